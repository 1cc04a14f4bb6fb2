"""Values that a trace fixes for good: branches and numbers that depend on values, and sizes, each with the user's line.

A trace holds the model's run on one batch. Whether that matters is tried with batches of other values.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbguard.training.doctor.analysis.export import ExportAttempt, FrozenValue
from nbguard.training.doctor.analysis.serving import TOLERANCE
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digest import digest, tensors_in
from nbguard.training.doctor.export.branches import where_statement
from nbguard.training.doctor.export.failures import Line, code_at, difference, is_inner, words_of
from nbguard.training.doctor.export.model_copy import shared_copy
from nbguard.training.doctor.subject import TrialSubject

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
