"""Predicted bytes for the remedies of a fit that nearly filled its device, such as a smaller batch, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.training.prediction.prediction import ChangeKind, Saving
    from nbguard.training.prediction.savings.change import Change
    from nbguard.training.profiler.analysis.report import FitReport, Remedy, RemedyKind

_FORESEEN: dict[RemedyKind, ChangeKind] = {"smaller batch": "accumulation", "checkpointing": "checkpoints"}
"""The change that is traced for each remedy."""
_PARTS = 2
"""Batches into which one is cut, as the remedy says."""


def with_foreseen_bytes(report: FitReport, source: str, namespace: dict[str, Any], seconds: float) -> FitReport:
    """Return a report whose remedies tell their savings, where these can be predicted in so many seconds; else as it is.

    Args:
        report: of the one fit of a cell.
        source: the cell, as Python.
        namespace: the user's names.
        seconds: until the last begin of a trace.
    """
    if not any(remedy.kind in _FORESEEN for remedy in report.remedies):
        return report
    try:
        before, savings = _savings(source, namespace, seconds)
    except (NbguardError, ImportError):
        return report
    return replace(report, remedies=tuple(_with_bytes(remedy, before, savings) for remedy in report.remedies))


def _savings(source: str, namespace: dict[str, Any], seconds: float) -> tuple[int, tuple[Saving, ...]]:
    """Return the peak of a cell's one fit in bytes, and the changes to it that could be traced."""
    import torch

    from nbguard.memory.allocator.model.policy import parse_version
    from nbguard.training.prediction.code.cell import fits_of_cell
    from nbguard.training.prediction.predict import tracer_of
    from nbguard.training.prediction.savings.savings import savings

    fits = fits_of_cell(source, namespace)
    if len(fits) != 1:
        raise NbguardError("the cell has several fits")
    tracer = replace(tracer_of(fits[0].source, code=fits[0].code), until=time.monotonic() + seconds)
    endless = tracer.endless(None)
    version = parse_version(str(torch.__version__))
    return endless.peak_allocated, savings(tracer, None, endless, version, is_wanted=_is_asked_for)


def _is_asked_for(change: Change) -> bool:
    return change.kind == "checkpoints" or (change.kind == "accumulation" and change.parts == _PARTS)


def _with_bytes(remedy: Remedy, before: int, savings: Iterable[Saving]) -> Remedy:
    kind = _FORESEEN.get(remedy.kind)
    saving = next((each for each in savings if kind and each.kind == kind), None)
    if saving is None or saving.peak_allocated >= before:
        return remedy
    saved = before - saving.peak_allocated
    peaks = f"a peak of {format_bytes(saving.peak_allocated)} instead of {format_bytes(before)}"
    effect = f"predicted: {format_bytes(saved)} less, {peaks}; {saving.cost}"
    return replace(remedy, effect=effect, nbytes=saved)
