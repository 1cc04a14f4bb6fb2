"""Values that a trace fixes for good: branches and numbers that depend on values, and sizes, each with the user's line.

A trace holds the model's run on one batch. Whether that matters is tried with batches of other values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbguard.training.doctor.analysis.export import TOLERANCE, ExportAttempt, ExportFailure, FrozenValue
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import digest, tensors_in
from nbguard.training.doctor.export.branches import where_statement
from nbguard.training.doctor.export.copies import shared_copy
from nbguard.training.doctor.export.failures import Line, code_at, difference, failure_at, is_inner, words_of
from nbguard.training.doctor.subject import TrialSubject

# --- All failures of an export in one go, since PyTorch's draft of an export goes on where an export would end.
#
# It also knows the line at which a size that may change was taken for a number, which the error of an export does not
# tell.


_KINDS = ("DATA_DEPENDENT_ERROR", "MISSING_FAKE_KERNEL")
_FIXED_SIZE = re.compile(r"Eq\(\w+, (\d+)\)")
"""The guard of a line that holds for one size only."""


def drafted_failures(model: nn.Module, batch: TrialBatch, shapes: Any = None) -> list[ExportFailure]:
    """Return the failures that a draft finds, or none where it fails itself, or where this PyTorch has none.

    Args:
        model: a copy of the user's model.
        batch: its arguments.
        shapes: which dimensions may change, as `torch.export.export` takes them; None if none may.
    """
    try:
        from torch._logging.structured import INTERN_TABLE
        from torch.export import draft_export
    except ImportError:
        return []
    try:
        with _trace_files_removed():
            report = draft_export(model, batch.inputs, batch.named_inputs, dynamic_shapes=shapes)._report
    except Exception:  # noqa: BLE001 - the export's own error is what there is to say then
        return []
    files = {number: file for file, number in dict(INTERN_TABLE).items()}
    failures = []
    for each in report.failures:
        kind = getattr(each.failure_type, "name", str(each.failure_type))
        guard = _FIXED_SIZE.fullmatch(str(each.data.get("expr", ""))) if kind == "GUARD_ADDED" else None
        if guard is None and kind not in _KINDS:
            continue
        if guard is None:
            message = f"depends on the value of {each.data.get('expr', each.data.get('op', ''))}"
        else:
            kind, message = "Constraints violated", f"the line holds only for a size of {guard[1]}"
        frames = [
            (files.get(frame["filename"], ""), frame["line"], frame["name"]) for frame in each.data.get("user_stack") or ()
        ]
        failures.append(failure_at(kind, message, frames, model))
    return failures


@contextlib.contextmanager
def _trace_files_removed() -> Iterator[None]:
    """Have the files of a draft written into a folder that goes with its end."""
    from torch._logging import _internal

    name = getattr(_internal, "DTRACE_ENV_VAR", "TORCH_DTRACE")
    before, handlers = os.environ.get(name), set(map(id, _handlers()))
    with tempfile.TemporaryDirectory(prefix="nbguard-draft-") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
            for handler in _handlers():
                if id(handler) not in handlers and type(handler).__module__.startswith("torch"):
                    handler.close()


def _handlers() -> list[Any]:
    """Return all handlers of logging that are alive."""
    return [handler for reference in list(logging._handlerList) if (handler := reference()) is not None]  # type: ignore[attr-defined]


_READS = frozenset(
    {
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__contains__",
        "__array__",
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
    }
)
"""Functions that make Python's own of a tensor's values."""
_BRANCH = re.compile(r"^(if|elif|while)\b| if ")
_SECONDS = 10.0
"""After which no further batches are tried."""
_ALWAYS = 2
"""Batches that are tried also of a model that reads no value."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One value that Python has read from a tensor."""

    line: Line
    value: Any  # a number, or the hash of a tensor


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    """Notes where Python reads values of tensors. Reads by PyTorch's own code are left out, as it knows of traces."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[_Read] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _READS and (line := _line()) is not None:
            plain = type(result) in (bool, int, float, complex)
            self.reads.append(_Read(line, result if plain else tuple(map(digest, tensors_in(args)))))
        return result


def _line() -> Line | None:
    """Return the innermost line that runs and is not PyTorch's; None if the call comes from here through PyTorch alone."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_inner(frame.f_code.co_filename):
        if frame.f_code is _called.__code__:
            return None
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _called(subject: TrialSubject, batch: TrialBatch) -> tuple[list[torch.Tensor], list[_Read]] | None:
    """Return the outputs of a fresh copy of the model, and the values that were read; None if it does not take the batch."""
    model, _ = shared_copy(subject.model)
    watch = _Watch()
    try:
        with watch:
            outputs = model(*batch.inputs, **(batch.named_inputs or {}))
    except Exception:  # noqa: BLE001 - the user's own model
        return None
    return list(tensors_in(outputs)), watch.reads


@contextlib.contextmanager
def tracer_warnings(lines: list[tuple[str, int]]) -> Iterator[None]:
    """Add the (file, line) of each warning of TorchScript's tracer to `lines`."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        yield
    lines += [(each.filename, each.lineno) for each in seen if issubclass(each.category, torch.jit.TracerWarning)]


def with_frozen(
    attempt: ExportAttempt, subject: TrialSubject, batch: TrialBatch, made: Callable[..., Any], warned: list[tuple[str, int]]
) -> ExportAttempt:
    """Return a trace that was compared, with its frozen values; `warned` are the lines of the tracer's warnings."""
    called = _called(subject, batch)
    if called is None:
        return attempt
    reads = list(dict.fromkeys(read.line for read in called[1]))
    places = {line[:2] for line in reads}
    own = list(dict.fromkeys(each for each in warned if each not in places and not is_inner(each[0])))
    sizes = tuple(FrozenValue(kind="size", line=words_of((*each, "")), code=code_at(*each)) for each in own)
    if not attempt.differences:  # two calls of the model differ, or a batch of another size is refused
        return replace(attempt, frozen=sizes)
    proven: dict[Line | None, FrozenValue] = {}
    started = time.perf_counter()
    for number, (what, other) in enumerate(other_batches(batch)):
        if (number >= _ALWAYS and not reads) or time.perf_counter() - started > _SECONDS:
            break
        proven = _differing(subject, other, what, made, called[1]) | proven
    harmless = [line for line in reads if line not in proven and not code_at(*line[:2]).startswith("assert")]
    return replace(attempt, frozen=(*proven.values(), *map(_frozen, harmless), *sizes))


def _frozen(line: Line) -> FrozenValue:
    kind, rewrite = _kind(line), where_statement(*line[:2])
    return FrozenValue(kind=kind, line=words_of(line), code=code_at(*line[:2]), rewrite=rewrite if kind == "branch" else "")


def _differing(
    subject: TrialSubject, batch: TrialBatch, what: str, made: Callable[..., Any], before: list[_Read]
) -> dict[Line | None, FrozenValue]:
    """Return the lines that read other values from a batch, if the program of the first computes something else for it."""
    called = _called(subject, batch)
    if called is None:
        return {}
    mine, reads = called
    try:
        found = difference(batch.items or 0, mine, list(tensors_in(made(*batch.inputs, **(batch.named_inputs or {})))))
    except Exception:  # noqa: BLE001 - an exported model raises what it likes
        largest = float("inf")
    else:
        if found.relative <= TOLERANCE:
            return {}
        largest = found.largest
    one, other = _by_line(before), _by_line(reads)
    others = [line for line in one | other if one.get(line) != other.get(line)]
    branches = [line for line in others if line and _kind(line) == "branch"]
    found_at: dict[Line | None, FrozenValue] = {line: _frozen(line) for line in branches or others if line}
    found_at = found_at or {None: FrozenValue(kind="value")}
    return {line: replace(value, batch=what, largest=largest) for line, value in found_at.items()}


def _by_line(reads: list[_Read]) -> dict[Line | None, list[Any]]:
    """Return the values that each line has read, in their order."""
    values: dict[Line | None, list[Any]] = {}
    for read in reads:
        values.setdefault(read.line, []).append(read.value)
    return values


def _kind(line: Line) -> Any:
    return "branch" if _BRANCH.search(code_at(*line[:2])) else "number"


def other_batches(batch: TrialBatch) -> Iterator[tuple[str, TrialBatch]]:
    """Yield (description, batch) of batches of the same shapes with other values, none beyond the range of integers' own."""

    def each(floats: Callable[[torch.Tensor], torch.Tensor], others: Callable[[torch.Tensor], torch.Tensor]) -> TrialBatch:
        return replace(batch.each(lambda tensor: (floats if tensor.is_floating_point() else others)(tensor)), targets=())

    def reversed_(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().flip(0).reshape(tensor.shape)

    def least(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if not tensor.numel() else tensor.min().expand(tensor.shape).clone()

    def most(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if not tensor.numel() else tensor.max().expand(tensor.shape).clone()

    yield "with the signs turned", each(torch.neg, torch.clone)
    yield "with its values in another order", each(reversed_, reversed_)
    yield "with positive values only", each(torch.abs, most)
    yield "with negative values only", each(lambda tensor: -tensor.abs(), least)
    yield "100 times as large", each(lambda tensor: tensor * 100, torch.clone)
    yield "a hundredth as large", each(lambda tensor: tensor / 100, torch.clone)
    yield "of zeros", each(torch.zeros_like, least)
