"""Mixed precision: whether the loss scale finds its level, and whether there is one where it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbguard.profiler.analysis.health.operations import FailedOperation
from nbguard.profiler.analysis.report import FitFinding, Setting
from nbguard.units import counted

_WARM_UP = 10
"""Updates in which a dynamic scale looks for its level: skipped steps are how it does."""
_SKIPS = 3
"""Steps that a fit may skip at any time without a word."""
_ENOUGH = 3
"""Batches until which a missing GradScaler may still come."""
_USUAL = 2.0**16
"""A GradScaler's first scale, if it is not told another."""
_NEVER = 10**6
"""Steps without a skipped one after which a scale grows that is not meant to grow."""


_LOOK_IN_FLOAT16 = (
    "look for the operation that overflows in float16 (`%%profile_fit --stop-on-nan`), or use `dtype=torch.bfloat16`"
)
_LOOK = "look for the operation whose gradient is not finite; for a NaN, `torch.autograd.set_detect_anomaly(True)` names it"
_SMALLER_GRADIENTS = "a lower learning rate, gradient clipping after `scaler.unscale_(optimizer)`, or bfloat16"
_OF_ANY_OPERATION = (_LOOK_IN_FLOAT16, _LOOK, _SMALLER_GRADIENTS)
"""Advice that helps only as long as the operation is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerFacts:
    """A GradScaler in use. Updates are numbered from 1."""

    initial: float  # scale before the first update
    growth: float  # factor by which it grows
    backoff: float  # factor by which it falls after a skipped step
    interval: int  # updates without a skipped step before it grows
    updates: int  # calls of `update`
    scales: tuple[tuple[int, float], ...] = ()  # (update, scale after it) wherever it changed
    skipped: tuple[int, ...] = ()  # the updates at which a step was skipped
    idle: int = 0  # of these, where no optimizer of several has stepped
    optimizers: int = 1  # whose steps it decides on
    is_static: bool = False  # the loop sets the scale by hand

    @property
    def last(self) -> float:
        """Return the scale at the end."""
        return self.scales[-1][1] if self.scales else self.initial

    @property
    def stays(self) -> bool:
        """Say whether the scale is meant to stay: it is set by hand, or never grows by itself."""
        return self.is_static or self.growth == 1 or self.interval >= _NEVER

    @property
    def is_idle(self) -> bool:
        """Say whether none of its steps was taken."""
        return self.idle == self.updates >= _SKIPS


@dataclass(frozen=True, slots=True)
class AmpFacts:
    """Mixed precision in training batches; float32 stands for none."""

    batches: tuple[tuple[str, int], ...] = ()  # (dtype, batches) by the dtype of autocast in the forward pass
    scalers: tuple[ScalerFacts, ...] = ()  # those in use and enabled
    by_hand: int = 0  # batches in float16 whose loss the loop itself had multiplied before the backward pass

    def in_dtype(self, dtype: str) -> int:
        """Return how many training batches ran in a dtype."""
        return dict(self.batches).get(dtype, 0)


def amp_findings(
    facts: AmpFacts, nan: FitFinding | None = None, optimizers: int = 1, made_by: FailedOperation | None = None
) -> tuple[FitFinding, ...]:
    """Return what stands out.

    Args:
        facts: what was seen.
        nan: the finding on values that are not finite, if there is one: steps are skipped and the scale falls because of them.
        optimizers: all of the fit.
        made_by: the operation whose gradient was not finite in step after step; None: not known.
    """
    skips = (_of(made_by, finding) for scaler in facts.scalers for finding in _skips(scaler, facts, nan, optimizers))
    return (*_missing(facts), *_needless(facts), *skips)


def _of(operation: FailedOperation | None, finding: FitFinding) -> FitFinding:
    """Return a finding on skipped steps with the operation that they come from, and without advice on how to look for it.

    In float16 a smaller scale may be its cure.
    """
    if operation is None:
        return finding
    is_known = operation.is_singular or finding.change in _OF_ANY_OPERATION
    change = operation.change if is_known else f"{operation.change}; or {finding.change}"
    return replace(finding, what=f"{finding.what}, by {operation.words}", change=change)


def consequences(facts: AmpFacts) -> str:
    """Return in words what values that are not finite have done to the scales and their steps; empty where nothing."""
    words = []
    for scaler in facts.scalers:
        if scaler.skipped:
            falls = f", and its scale fell to {scaler.last:g}" if scaler.last < scaler.initial else ""
            words.append(f"{len(scaler.skipped)} of {scaler.updates} steps were skipped by the GradScaler{falls}")
    return "; ".join(words)


def scale_settings(facts: AmpFacts) -> tuple[Setting, ...]:
    """Return the history of each scale."""
    if facts.by_hand and not facts.scalers:  # a scaler is not known before its first update
        return (
            Setting("loss scale", "by hand", f"the loop multiplied the loss in {counted(facts.by_hand, 'batch', 'batches')}"),
        )
    return tuple(Setting("loss scale", _path(scaler), _kind(scaler)) for scaler in facts.scalers)


def _missing(facts: AmpFacts) -> Iterator[FitFinding]:
    count = facts.in_dtype("float16")
    if count - facts.by_hand >= _ENOUGH and not facts.scalers:
        yield FitFinding(
            kind="amp",
            severity="problem",
            what="float16 without a GradScaler",
            evidence=f"{count} of the sampled batches ran under autocast in float16; gradients below 6e-8 became 0 "
            "because nothing scales the loss",
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
            evidence=f"{count} of the sampled batches ran in bfloat16, which has the range of float32, so the scaler "
            "checks every gradient for nothing",
            change="`GradScaler(enabled=False)`, or remove it",
        )


def _skips(scaler: ScalerFacts, facts: AmpFacts, nan: FitFinding | None, optimizers: int) -> Iterator[FitFinding]:
    late_skips = [update for update in scaler.skipped if update > _warm_up(scaler)]
    allowed = _SKIPS + scaler.updates // max(1, scaler.interval)  # each growth may cost one
    if scaler.is_idle:
        yield _not_trained(scaler, facts, nan, optimizers)
    elif nan is not None:
        return  # the scale and its steps go by that
    elif len(scaler.skipped) > max(_SKIPS, scaler.updates / 2):
        what = f"{len(scaler.skipped)} of {scaler.updates} steps were skipped because their gradients were not finite"
        yield _problem(what, scaler, _smaller_scale(scaler, facts))
    elif len(late_skips) > allowed:
        what = f"{len(late_skips)} steps skipped after the warm-up because their gradients were not finite"
        yield _problem(what, scaler, _SMALLER_GRADIENTS)
    elif scaler.last < 1:
        what = f"the loss scale fell to {scaler.last:g}: below 1 it shrinks small gradients instead of protecting them"
        yield _problem(what, scaler, _finite_gradients(facts))


def _problem(what: str, scaler: ScalerFacts, change: str) -> FitFinding:
    return FitFinding(
        kind="amp", severity="problem", what=what, evidence=f"scale {_path(scaler)} ({_kind(scaler)})", change=change
    )


def _not_trained(scaler: ScalerFacts, facts: AmpFacts, nan: FitFinding | None, optimizers: int) -> FitFinding:
    """Return that no step was taken, with the cause where the report knows one."""
    skipped = f"every one of {scaler.updates} steps was skipped"
    is_all = optimizers <= scaler.optimizers  # another one may have trained a part of the model
    what = f"the model was not trained: {skipped}" if is_all else f"{skipped} that the GradScaler decides on"
    if nan is None:
        return replace(_problem(what, scaler, _smaller_scale(scaler, facts)), kind="not trained")
    found = _problem(f"{what}, as {nan.what}", scaler, nan.change)
    return replace(found, kind="not trained", evidence=f"{nan.evidence}; {found.evidence}")


def _smaller_scale(scaler: ScalerFacts, facts: AmpFacts) -> str:
    """Return what to do about a scale under which gradients are not finite."""
    if scaler.last >= _USUAL and (scaler.initial > _USUAL or scaler.stays):
        return f"a scale of {scaler.last:g} is too high; `torch.amp.GradScaler()` starts at 65536 and adapts"
    if scaler.is_static:
        return "leave the scale to the GradScaler; `scaler.update()` lowers it after a skipped step"
    return _finite_gradients(facts)


def _finite_gradients(facts: AmpFacts) -> str:
    return _LOOK_IN_FLOAT16 if facts.in_dtype("float16") else _LOOK


def _warm_up(scaler: ScalerFacts) -> int:
    """Return the last update of the warm-up: ten, or the steps skipped in a row from the start if these are more."""
    in_a_row = next((i for i, update in enumerate(scaler.skipped) if update != i + 1), len(scaler.skipped))
    return max(_WARM_UP, in_a_row)


def _path(scaler: ScalerFacts) -> str:
    scales = [scaler.initial, *(scale for _, scale in scaler.scales)]
    return " → ".join(f"{scale:g}" for scale in (scales if len(scales) <= 4 else [scales[0], min(scales), scales[-1]]))


def _kind(scaler: ScalerFacts) -> str:
    skipped = f"{len(scaler.skipped)} of {scaler.updates} steps skipped"
    if scaler.is_static:
        return f"static, given by hand; {skipped}"
    falls = f"×{scaler.backoff:g} after a skipped step"
    kind = f"static: {falls}" if scaler.stays else f"dynamic: {falls}, ×{scaler.growth:g} after {scaler.interval} others"
    return f"{kind}; {skipped}"
