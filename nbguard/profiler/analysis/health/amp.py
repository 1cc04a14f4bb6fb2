"""Mixed precision: whether the loss scale finds its level, and whether there is one where it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.profiler.analysis.report import FitFinding

_WARM_UP = 10
"""Updates in which a dynamic scale looks for its level: skipped steps are how it does."""
_SKIPS = 3
_ENOUGH = 3
"""Batches until which a missing GradScaler may still come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerFacts:
    """A GradScaler in use. Updates are numbered from 1."""

    initial: float  # scale before the first update
    growth: float  # factor by which it grows
    backoff: float  # factor by which it falls after a skipped step
    interval: int  # updates without a skipped step before it grows
    updates: int  # calls of `update`
    scales: tuple[tuple[int, float], ...] = ()  # (update, scale after it) wherever it changed
    skipped: tuple[int, ...] = ()  # the updates at which the scale fell: that step was skipped
    is_static: bool = False  # the scale was given by hand: then the skipped steps are not known

    @property
    def last(self) -> float:
        """Return the scale at the end."""
        return self.scales[-1][1] if self.scales else self.initial


@dataclass(frozen=True, slots=True)
class AmpFacts:
    """Mixed precision in training batches; float32 stands for none."""

    batches: tuple[tuple[str, int], ...] = ()  # (dtype, batches) by the dtype of autocast in the forward pass
    scalers: tuple[ScalerFacts, ...] = ()  # those in use and enabled

    def in_dtype(self, dtype: str) -> int:
        """Return how many training batches ran in a dtype."""
        return dict(self.batches).get(dtype, 0)


def amp_findings(facts: AmpFacts) -> tuple[FitFinding, ...]:
    """Return what stands out, and for each scaler its history."""
    return (*_missing(facts), *_needless(facts), *(finding for scaler in facts.scalers for finding in _history(scaler)))


def _missing(facts: AmpFacts) -> Iterator[FitFinding]:
    count = facts.in_dtype("float16")
    if count >= _ENOUGH and not facts.scalers:
        yield FitFinding(
            kind="amp",
            severity="problem",
            what="float16 without a GradScaler",
            evidence=f"{count} of the batches looked at ran under autocast in float16; gradients below 6e-8 became 0, "
            "as nothing scales "
            "the loss",
            change="`scaler = torch.amp.GradScaler()`, `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, "
            "`scaler.update()`; "
            "or `dtype=torch.bfloat16`, which needs none",
        )


def _needless(facts: AmpFacts) -> Iterator[FitFinding]:
    count = facts.in_dtype("bfloat16")
    if count and not facts.in_dtype("float16") and facts.scalers:
        yield FitFinding(
            kind="amp",
            severity="advice",
            what="a GradScaler with bfloat16 is not needed",
            evidence=f"{count} of the batches looked at ran in bfloat16, which has the range of float32; the scaler "
            "looks at every "
            "gradient for nothing",
            change="`GradScaler(enabled=False)`, or take it out",
        )


def _history(scaler: ScalerFacts) -> Iterator[FitFinding]:
    late_skips = [update for update in scaler.skipped if update > _warm_up(scaler)]
    allowed = _SKIPS + scaler.updates // max(1, scaler.interval)  # each growth may cost one
    words = _words(scaler)
    if len(late_skips) > allowed:
        what = f"{len(late_skips)} steps skipped after the warm-up: their gradients were not finite"
        change = "a lower learning rate, gradient clipping after `scaler.unscale_(optimizer)`, or bfloat16"
        yield FitFinding(kind="amp", severity="problem", what=what, evidence=words, change=change)
    elif scaler.last < 1:
        what = f"the loss scale has fallen to {scaler.last:g}: below 1 it makes small gradients smaller instead of keeping them"
        change = (
            "look for the operation that overflows in float16 (`%%profile_fit --stop-on-nan`), or use `dtype=torch.bfloat16`"
        )
        yield FitFinding(kind="amp", severity="problem", what=what, evidence=words, change=change)
    else:
        yield FitFinding(
            kind="amp", severity="note", what=f"the loss is scaled by {scaler.last:g}", evidence=words, change="nothing"
        )


def _warm_up(scaler: ScalerFacts) -> int:
    """Return the last update of the warm-up: ten, or the steps skipped in a row from the start if these are more."""
    in_a_row = next((i for i, update in enumerate(scaler.skipped) if update != i + 1), len(scaler.skipped))
    return max(_WARM_UP, in_a_row)


def _words(scaler: ScalerFacts) -> str:
    scales = [scaler.initial, *(scale for _, scale in scaler.scales)]
    path = " → ".join(f"{scale:g}" for scale in (scales if len(scales) <= 4 else [scales[0], min(scales), scales[-1]]))
    if scaler.is_static:
        return f"scale {path}, given by hand (static); which steps were skipped is then not known"
    kind = f"dynamic: ×{scaler.backoff:g} after a skipped step, ×{scaler.growth:g} after {scaler.interval} others"
    return f"scale {path} ({kind}); {len(scaler.skipped)} of {scaler.updates} steps skipped"
