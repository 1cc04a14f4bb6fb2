"""The operations of a step, the nondeterministic ones among them, and the modes of deterministic computing."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.libraries import library_paths
from nbguard.training.doctor.analysis.step_trace import Mode, OperationFact
from nbguard.training.doctor.determinism.digests import digest, tensors_in

_NAME = re.compile(r"(\S+) does not have a deterministic implementation")
_DEFAULT = re.compile(r"(.+?) defaults to a non-deterministic algorithm")
_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "resize_")


class ModuleStack:
    """The modules whose forward pass runs now, the innermost last."""

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = paths
        self._running: list[str] = []

    @property
    def innermost(self) -> str:
        """Return the path of the module that runs; empty outside of all."""
        return self._running[-1] if self._running else ""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the modules that are called."""
        module = nn.modules.module
        handles = [
            module.register_module_forward_pre_hook(lambda one, _: self._enter(one)),
            module.register_module_forward_hook(lambda one, _, __: self._leave(one), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _enter(self, module: Any) -> None:
        if id(module) in self._paths:
            self._running.append(self._paths[id(module)])

    def _leave(self, module: Any) -> None:
        if id(module) in self._paths and self._running:
            self._running.pop()


@contextlib.contextmanager
def warned_operations(paths: dict[int, str], seen: list[OperationFact]) -> Iterator[None]:
    """Have PyTorch warn of every operation without a deterministic implementation, and note each with its module."""
    stack = ModuleStack(paths)

    def show(message: Any, *_: Any, **__: Any) -> None:
        text = str(message)
        match = _NAME.search(text) or _DEFAULT.search(text)
        if match is not None:
            is_default = _NAME.search(text) is None
            fact = OperationFact(name=match[1].strip(), module=stack.innermost, line=_users_line(), is_default=is_default)
            if fact not in seen:
                seen.append(fact)

    with stack.following(), warnings.catch_warnings(), algorithms("warn only"):
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def mode_now() -> Mode:
    """Return PyTorch's deterministic mode."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


@contextlib.contextmanager
def unrefused() -> Iterator[None]:
    """Let operations without a deterministic implementation pass, and without a warning, where the mode refuses them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"(?s).*({_NAME.pattern}|{_DEFAULT.pattern})")
        with contextlib.nullcontext() if mode_now() == "off" else algorithms("warn only"):
            yield


@contextlib.contextmanager
def algorithms(mode: Mode) -> Iterator[None]:
    """Set PyTorch's deterministic mode and cuDNN's switches; afterwards they are as before.

    With the mode off `cudnn.benchmark` stays as it is: it is the user's.
    """
    was_on, was_warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn: Any = torch.backends.cudnn
    was_benchmark, was_deterministic = cudnn.benchmark, cudnn.deterministic
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn only")
        cudnn.benchmark, cudnn.deterministic = was_benchmark and mode == "off", mode != "off"
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        cudnn.benchmark, cudnn.deterministic = was_benchmark, was_deterministic
        torch.utils.deterministic.fill_uninitialized_memory = fills


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step, with the bits that went into it and came out."""

    fact: OperationFact
    before: tuple[bytes, ...]
    numbers: str  # arguments that are no tensors
    after: tuple[bytes, ...]


class OperationTrace(TorchDispatchMode):  # type: ignore[misc]
    """Hashes the inputs and outputs of each operation of both passes."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self.stack: ModuleStack = ModuleStack(paths)
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        name = str(func).removesuffix(".default")
        is_empty = name.removeprefix("aten.").partition(".")[0] in _UNINITIALISED
        before = tuple(map(digest, tensors_in((args, kwargs))))
        result = func(*args, **kwargs)
        self.operations.append(
            Operation(
                fact=OperationFact(name=name, module=self.stack.innermost, line=_users_line()),
                before=before,
                numbers=_numbers(args, kwargs),
                after=() if is_empty else tuple(map(digest, tensors_in(result))),
            )
        )
        return result


@contextlib.contextmanager
def traced_operations(trace: OperationTrace) -> Iterator[None]:
    """Note every operation, with the module that runs."""
    with trace.stack.following(), trace:
        yield


def first_other(one: list[Operation], other: list[Operation]) -> tuple[OperationFact, bool] | None:
    """Return (operation, whether Python gave it another number) of the first operation that two steps do not share."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.fact.name != theirs.fact.name or mine.numbers != theirs.numbers:
            return mine.fact, True
        if mine.before != theirs.before:
            return mine.fact, True  # a tensor that no operation made: copied from Python's numbers
        if mine.after != theirs.after:
            return mine.fact, False
    return None


def _numbers(args: Any, kwargs: Any) -> str:
    """Return the arguments that are no tensors, as text to compare."""
    if isinstance(args, torch.Tensor):
        return "T"
    if isinstance(args, (tuple, list)):
        return f"[{','.join(_numbers(part, None) for part in args)}]" + (
            "" if not kwargs else _numbers(list(kwargs.values()), None)
        )
    return repr(args) if type(args) in (int, float, bool, str, complex, type(None)) else type(args).__name__


def _users_line() -> str:
    """Return the innermost line of the stack that is the user's own, as `In[7], line 3 in forward()`; empty without one."""
    libraries = library_paths()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*libraries, "<frozen", "<string>")):
            return Sites().line(name, frame.f_lineno, frame.f_code.co_name)
        if name.endswith("doctor/determinism/step.py"):
            return ""
        frame = frame.f_back
    return ""
