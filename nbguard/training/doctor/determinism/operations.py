"""The operations of a step, the nondeterministic ones among them, the seeds of loaders, and the switches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attribute_of, attributes_of, mro_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.training.doctor.analysis.seed_checks import LoaderSeeds, SwitchStates
from nbguard.training.doctor.analysis.step_trace import Mode, OperationFact
from nbguard.training.doctor.subject import TrialSubject

# --- Hashes of tensors by their bytes: NaN equals NaN, and −0 is not 0. A sum could not tell a permutation.


def digest(tensor: torch.Tensor) -> bytes:
    """Return 16 bytes that stand for the bytes of a tensor, its shape and its type."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        plain = tensor.detach()
        if plain.is_quantized:
            plain = plain.int_repr()
        parts = _dense(plain)
        header = f"{plain.dtype} {tuple(plain.shape)}".encode()
        result = hashlib.sha1(header, usedforsecurity=False)  # processors have instructions for it: the quickest of hashlib's
        for part in parts:
            result.update(flat_bytes(part).cpu().numpy() if part.numel() else b"")
    return result.digest()[:16]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor one behind the other, without a copy where they lie so."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element that was expanded counts as contiguous
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor consists of; its own conjugation is carried out."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's inputs or outputs: tuples, lists, dicts, objects with attributes."""
    bases = mro_of(type(value))
    if torch.Tensor in bases:
        yield value
    elif depth and (tuple in bases or list in bases):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and dict in bases:
        for part in dict.values(value):
            yield from tensors_in(part, depth - 1)
    elif depth and type(value).__module__ != "builtins" and (attributes := attributes_of(value)) is not None:
        for part in list(attributes.values()):
            yield from tensors_in(part, depth - 1)


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


# --- The seeds of loaders and the switches of deterministic computing, read from attributes.


_NAMES = ("the training loader", "the validation loader")


def loaders_of(subject: TrialSubject) -> list[Any]:
    """Return the loaders of a subject, the training one first."""
    if subject.learn is None:
        return [] if subject.loader is None else [subject.loader]
    loaders = attribute_of(attribute_of(subject.learn, "dls"), "loaders")
    return list(loaders) if type(loaders) is list else []


def loader_seeds(subject: TrialSubject) -> tuple[LoaderSeeds, ...]:
    """Return where the random numbers of each loader come from."""
    return tuple(_seeds(loader, name) for loader, name in zip(loaders_of(subject), _NAMES, strict=False))


def _seeds(loader: Any, name: str) -> LoaderSeeds:
    inner = attribute_of(loader, "fake_l")
    if inner is not None:
        return LoaderSeeds(
            name=name,
            is_learners=True,
            shuffles=attribute_of(loader, "shuffle") is True,
            workers=_workers(inner),
            has_generator=attribute_of(inner, "generator") is not None,
        )
    sampler = sampler_of(loader)
    own = has_generator(sampler)
    source = _drawn_by(sampler)
    return LoaderSeeds(
        name=name,
        shuffles=own is not None,
        workers=_workers(loader),
        has_generator=attribute_of(loader, "generator") is not None,
        sampler=type(sampler).__name__ if source or (own is False and not _is_shuffles(sampler, loader)) else "",
        source=source,
    )


_TORCHS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
"""Samplers of torch's that draw the order: from a generator of their own, or from the global one."""
_DRAWS = frozenset(("choice", "choices", "permutation", "rand", "randint", "randperm", "sample", "shuffle"))
"""Functions that draw, of random, numpy.random and torch."""
_OWN = frozenset(("Generator", "Random", "RandomState", "default_rng", "generator", "manual_seed", "rng", "seed"))
"""Names in the code of a sampler with a seed or generator of its own."""


def sampler_of(loader: Any) -> Any:
    """Return the sampler that gives a loader of torch's its order: also the one of batches, or the one inside of that."""
    batches = attribute_of(loader, "batch_sampler")
    inner = attribute_of(batches, "sampler")
    return inner if inner is not None else batches if batches is not None else attribute_of(loader, "sampler")


def has_generator(sampler: Any) -> bool | None:
    """Say whether a sampler of torch's that draws has a generator of its own; None for any other sampler."""
    if not any(getattr(torch.utils.data, name) in mro_of(type(sampler)) for name in _TORCHS):
        return None
    return attribute_of(sampler, "generator") is not None


def _is_shuffles(sampler: Any, loader: Any) -> bool:
    """Say whether a sampler may be the one that `shuffle=True` made, which has the loader's generator."""
    return type(sampler) is torch.utils.data.RandomSampler and attribute_of(loader, "generator") is None


def _drawn_by(sampler: Any) -> str:
    """Return the function of a global generator by which a class that is not torch's draws; empty if none is seen."""
    kind = type(sampler)
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    code = getattr(vars(kind).get("__iter__"), "__code__", None)
    names = () if code is None else code.co_names
    if _OWN.intersection(names):
        return ""
    at = next((at for at, name in enumerate(names) if name in _DRAWS), None)
    return "" if at is None else ".".join(names[max(0, at - 1) : at + 1])


def _workers(loader: Any) -> int:
    workers = attribute_of(loader, "num_workers")
    return workers if type(workers) is int else 0


def switch_states(subject: TrialSubject) -> SwitchStates:
    """Return the switches as they are."""
    return SwitchStates(
        mode=mode_now(),
        benchmark=bool(torch._C._get_cudnn_benchmark()),
        uses_gpu=any(parameter.device.type == "cuda" for parameter in subject.model.parameters()),
        tf32=_tf32(),
        needs_cublas=_CUBLAS in (torch.use_deterministic_algorithms.__doc__ or "") and _CUBLAS not in os.environ,
        hash_seed=os.environ.get("PYTHONHASHSEED", "") if not sys.flags.hash_randomization else "",
        threads=torch.get_num_threads(),
    )


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""A variable that deterministic mode asked for, as its help says, until each stream had a workspace of its own."""


def _tf32() -> tuple[str, ...]:
    """Return the switches that are on for TensorFloat-32, as one writes them."""
    backends = torch.backends
    switches = {
        "torch.backends.cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
    }
    return tuple(name for name, read in switches.items() if _is_on(read))


def _is_on(read: Callable[[], object]) -> bool:
    try:
        return read() is True
    except RuntimeError:  # set through the newer `fp32_precision`, which this one does not show
        return False
