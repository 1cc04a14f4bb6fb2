"""A peak that rose in the middle of a fit, since more parameters are trained from there on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.profiler.analysis.report import FitFinding
from nbguard.units import MiB, counted, format_bytes

_NOTICED = MiB
"""Bytes by which a peak rises; less is not worth a word."""
_PART = 0.1
"""Share of the rise that gradients and optimizer state take, at least, for them to be its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfrozen:
    """Parameters that an optimizer trains from some step on, and did not train before. Sizes in bytes."""

    parameters: int  # so many more
    peak: int  # before that step's batch
    kept: int  # by the gradients and the state of the optimizer, more than before


def unfrozen_finding(unfrozen: Unfrozen | None, peak: int) -> Iterator[FitFinding]:
    """Yield the reason why the peak rose to `peak` bytes, where it is known."""
    if unfrozen is None:
        return
    rise = peak - unfrozen.peak
    if rise < _NOTICED or unfrozen.kept < _PART * rise:
        return
    rest = "" if unfrozen.kept >= rise else "; the rest goes to activations that their backward pass needs, as a rule"
    yield FitFinding(
        kind="unfrozen",
        severity="note",
        what=f"the peak rose from {format_bytes(unfrozen.peak)} to {format_bytes(peak)}, because "
        f"{counted(unfrozen.parameters, 'more parameter is', 'more parameters are')} trained",
        evidence=f"their gradients and optimizer state take {format_bytes(unfrozen.kept)}{rest}",
        change="`requires_grad_(False)` of layers that need not learn (fastai: `learn.freeze_to(-2)`), or a smaller batch",
        nbytes=rise,
    )
