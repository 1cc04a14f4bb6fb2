"""Errors of exporters as facts (module, line, message), and the comparison of two models' outputs for one batch."""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
import re
import traceback
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.markup import clean, line_words
from nbguard.training.doctor.analysis.export import ExportFailure, ValueDifference
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.export.branches import cond_call, where_statement
from nbguard.training.doctor.export.copies import shared_copy
from nbguard.training.doctor.subject import TrialSubject

# --- A call that would write into the user's parameters is stopped before it does, and the model is then tried on a copy.


class _WritesError(Exception):
    """An operation was about to write into memory that is not its model's own."""


class WriteWatch(TorchDispatchMode):  # type: ignore[misc]
    """Refuses each operation that writes into one of some tensors; `wrote` says whether there was one."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.wrote: bool = False
        self._storages = {pointer for tensor in tensors if (pointer := _pointer(tensor))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(each, torch.Tensor) and _pointer(each) in self._storages for each in written):
                self.wrote = True
                raise _WritesError
        return func(*args, **kwargs)


def _pointer(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 of one that has none, such as a sparse one."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def own_if_written(subject: TrialSubject, batch: TrialBatch) -> TrialSubject:
    """Return the subject; of a model that writes into its parameters when it is called, with a copy of the model instead.

    It is called once, without gradients, on parameters that share the user's memory, and stopped before the first write.
    """
    model, _ = shared_copy(subject.model)
    watch = WriteWatch(model.parameters())
    with contextlib.suppress(Exception), torch.no_grad(), watch:  # the user's own error comes again where it is told
        model(*batch.inputs, **(batch.named_inputs or {}))
    return replace(subject, model=_own(subject.model)) if watch.wrote else subject


def _own(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters lie in memory of their own."""
    copied, _ = shared_copy(model)
    return copy.deepcopy(copied)


# --- Two models' outputs for one batch, compared.


def difference(items: int, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> ValueDifference:
    """Return the largest difference of two lists of outputs."""
    largest, scale = 0.0, 0.0
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in theirs]:
        return ValueDifference(items=items, largest=inf, relative=inf)
    for one, other in zip(mine, theirs, strict=True):
        if not one.numel():
            continue
        exact, close = (tensor.detach().double().cpu() for tensor in (plain(one), plain(other)))
        other = ~((exact == close) | (exact.isnan() & close.isnan()))
        largest = max(
            largest, float((exact - close).abs()[other].nan_to_num(nan=inf, posinf=inf).max()) if other.any() else 0.0
        )
        finite = exact[exact.isfinite()].abs()
        scale = max(scale, float(finite.max()) if finite.numel() else 0.0)
    return ValueDifference(items=items, largest=largest, relative=largest / scale if scale else largest)


def plain(tensor: Any) -> torch.Tensor:
    """Return a tensor of a subclass as one of PyTorch's own, without a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        own: torch.Tensor = tensor.as_subclass(torch.Tensor)
        return own


_FROM_USER_CODE = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
"""As the strict export writes its lines; TorchScript, which has the innermost first, writes no function."""
_ON_MODULE = re.compile(r"on module '(\w+)'")
Line = tuple[str, int, str]
"""(file, line, function)"""

_INNER = ("torch", "_ops", "fasttransform", "fastcore", "nbguard")
"""Packages whose lines are not the reason: the line that called them is."""


def failure_of(error: BaseException, model: nn.Module) -> ExportFailure:
    """Return an error of an exporter as a fact. `model` is the copy that was exported."""
    paths = {id(module): path for path, module in model.named_modules()}
    module, line = _of_traceback(error.__traceback__, paths)
    text = str(error)
    if module is None:
        frames = [(file, int(number), function) for file, number, function in _FROM_USER_CODE.findall(text)]
        own = [frame for frame in frames if not is_inner(frame[0])]
        if own and not own[0][2]:
            own.reverse()
        module, line = _of_frames(own or ([line] if line else []), model)
        module = module or _by_class(text, model)
    return _failure(type(error).__name__, _first_line(text), module, line)


def _by_class(text: str, model: nn.Module) -> tuple[str, Any] | None:
    """Return (path, module) of the first module of the class that a message of TorchScript's names."""
    match = _ON_MODULE.search(text)
    named = model.named_modules() if match is not None else ()
    return next(((path, each) for path, each in named if match is not None and type(each).__name__ == match[1]), None)


def failure_at(kind: str, message: str, frames: Iterable[Line], model: nn.Module) -> ExportFailure:
    """Return a failure by a stack without live frames, the outermost first."""
    return _failure(kind, message, *_of_frames([frame for frame in frames if not is_inner(frame[0])], model))


def failure_in(model: nn.Module, module: nn.Module, line: Line, *, output: str) -> ExportFailure:
    """Return the failure of a module that returns an object of a class which no exported program can return."""
    path = next(path for path, each in model.named_modules() if each is module)
    return replace(_failure("", "", (path, module), line), output=output)


def _of_frames(frames: list[Line], model: nn.Module) -> tuple[tuple[str, Any] | None, Line | None]:
    """Return (path and module, line) of the innermost line that is of a module's forward pass; else the innermost of all."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame in reversed(frames):
        owner = _owner(frame, model)
        if owner is not None:
            return (paths[id(owner)], owner), frame
    return None, frames[-1] if frames else None


def _failure(kind: str, message: str, module: tuple[str, Any] | None, line: Line | None) -> ExportFailure:
    name = "" if module is None else f"{type(module[1]).__module__}.{type(module[1]).__qualname__}"
    return ExportFailure(
        error=kind,
        message=clean(message, 220),
        module="" if module is None else module[0],
        module_class=name,
        line="" if line is None else words_of(line),
        code="" if line is None else code_at(line[0], line[1]),
        site=line or ("", 0, ""),
        where="" if line is None else where_statement(line[0], line[1]),
        cond="" if line is None else cond_call(line[0], line[1]),
    )


def words_of(line: Line) -> str:
    """Return a line as it is shown, as in In[7], line 3 in forward()."""
    return line_words(_place(line[0]), line[1], line[2])


def code_at(file: str, number: int) -> str:
    """Return the text of a line; empty where no source is to be had."""
    return linecache.getline(file, number).strip()[:100]


def _of_traceback(trace: TracebackType | None, paths: dict[int, str]) -> tuple[tuple[str, Any] | None, Line | None]:
    """Return (path and module, line) of the innermost forward pass in a traceback; else the innermost line outside of torch."""
    module, line, last = None, None, None
    for frame, number in traceback.walk_tb(trace):
        here = frame.f_code.co_filename, number, frame.f_code.co_name
        if not is_inner(here[0]):
            last = here
            own = frame.f_locals.get("self")
            if id(own) in paths and isinstance(own, nn.Module):
                module, line = (paths[id(own)], own), here
    return module, line or last


def is_inner(file: str) -> bool:
    """Say whether a file is PyTorch's, or of others whose lines are not the reason."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[len(parts) - 1 - parts[::-1].index("site-packages") + 1].removesuffix(".py") in _INNER
    is_no_file = file.startswith("<") and not file.startswith("<ipython-input")  # a cell in a terminal
    return is_no_file or "/nbguard/training/doctor/" in file or "contextlib" in file


def _owner(line: Line, model: nn.Module) -> Any:
    """Return the module that has a line of code in its forward pass, or in another method; None if none has."""
    for module in model.modules():
        methods = (type(module).forward, getattr(type(module), line[2], None) if line[2] else None)
        if any(_has_line(getattr(inspect.unwrap(method), "__code__", None), line) for method in methods if method is not None):
            return module
    return None


def _has_line(code: CodeType | None, line: Line) -> bool:
    """Say whether a line is one of a function's; TorchScript tells no function's name."""
    if code is None or code.co_filename != line[0] or line[2] not in ("", code.co_name):
        return False
    numbers = [number for _, _, number in code.co_lines() if number]
    return bool(numbers) and min(numbers) <= line[1] <= max(numbers)


def _place(file: str) -> str:
    """Return a file as it is shown: the cell, or the last two parts of its path."""
    place = Sites().place(file)
    return place if place.startswith("In[") else "/".join(Path(file).parts[-2:])


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line.partition(" For more information, run with")[0]
