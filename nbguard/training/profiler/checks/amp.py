"""Mixed precision, with autocast's dtype, and whether the scale of every GradScaler, fastai's too, finds its level."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any

from nbguard.memory.core.advice import STOP_ON_NAN
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, mro_of
from nbguard.training.profiler.analysis.operations import FailedOperation
from nbguard.training.profiler.analysis.report import FitFinding, Setting
from nbguard.training.profiler.checks.check import AsyncScalars, FitFigures
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import counted

_WARM_UP = 10
"""Updates that a dynamic scale needs to find its level, by skipped steps."""
_SKIPS = 3
"""Steps that a fit may skip at any time without a word."""
_ENOUGH = 3
"""Batches until which a missing GradScaler may still come."""
_USUAL = 2.0**16
"""A GradScaler's first scale, if it is not told another."""
_NEVER = 10**6
"""Steps without a skipped one until the growth of a scale that is not meant to grow."""


_LOOK_IN_FLOAT16 = "look for the operation that overflows in float16 (" + STOP_ON_NAN.code + "), or use `dtype=torch.bfloat16`"
_LOOK = "look for the operation whose gradient is not finite; for a NaN, `torch.autograd.set_detect_anomaly(True)` names it"
_SMALLER_GRADIENTS = "a lower learning rate, gradient clipping after `scaler.unscale_(optimizer)`, or bfloat16"
_OF_ANY_OPERATION = (_LOOK_IN_FLOAT16, _LOOK, _SMALLER_GRADIENTS)
"""Advice that helps only as long as the operation is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerFacts:
    """A GradScaler in use. Updates are numbered from 1."""

    initial: float  # scale before the first update
    growth: float  # factor of its growth
    backoff: float  # factor of its fall after a skipped step
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
    """Return the findings.

    Args:
        facts: the observations.
        nan: the finding on values that are not finite, if there is one: steps are skipped and the scale falls because of them.
        optimizers: all of the fit.
        made_by: the operation whose gradient was not finite in step after step, or None if unknown.
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
    change = operation.change if is_known else operation.change + "; or " + finding.change
    return replace(finding, what=finding.what + f", by {operation.words}", change=change)


def consequences(facts: AmpFacts) -> str:
    """Return in words the effect of non-finite values on the scales and their steps, or "" without any."""
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
            "needlessly checks every gradient",
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
    what = f"the model was not trained: {skipped}" if is_all else f"{skipped} by the GradScaler"
    if nan is None:
        return replace(_problem(what, scaler, _smaller_scale(scaler, facts)), kind="not trained")
    found = _problem(what + ", as " + nan.what, scaler, nan.change)
    return replace(found, kind="not trained", evidence=nan.evidence + "; " + found.evidence)


def _smaller_scale(scaler: ScalerFacts, facts: AmpFacts) -> str:
    """Return the remedy for a scale that makes gradients non-finite."""
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


_MULTIPLIES = "MulBackward0"
_FACTORS = (_MULTIPLIES, "DivBackward0")
_LINEAR = (*_FACTORS, "MeanBackward0", "SumBackward0", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0", "NegBackward0")
"""Operations after a loss that do no more than scale it."""
_DEEPEST = 8
"""Most of these in a row that are examined."""
_SCALED = 16
"""Least factor of a loss that keeps its gradients in range, instead of weighing it."""
_KEPT = 1000
"""Changes of a scale that are kept."""


class _Scaler:
    """The state of one GradScaler so far."""

    def __init__(self, scaler: Any) -> None:
        attributes = attributes_of(scaler) or {}
        self.of = weakref.ref(scaler)
        self.initial = self.last = float(attributes.get("_init_scale", 1.0))
        self.growth, self.backoff = float(attributes.get("_growth_factor", 0)), float(attributes.get("_backoff_factor", 0))
        self.interval = int(attributes.get("_growth_interval", 0))
        self.updates = self.idle = 0
        self.optimizers = 1
        self.is_static = False
        self.scales: list[tuple[int, float]] = []
        self.skipped: list[int] = []

    def is_now(self, update: int, is_told: bool, values: tuple[float, ...]) -> None:
        """Take a scale down: `values` after the update of this number.

        `is_told`: which steps were skipped is told otherwise; else the scale fell by them, or can fall no further.
        """
        (scale,) = values
        if scale != self.last and len(self.scales) < _KEPT:
            self.scales.append((update, scale))
        if not is_told and (scale < self.last or scale == 0 or not math.isfinite(scale)):
            self.skipped.append(update)
            self.idle += 1
        self.last = scale

    def were_infinite(self, update: int, is_added_up: bool, values: tuple[float, ...]) -> None:
        """Take down which optimizers had gradients that were not finite; with `is_added_up` the first value is the sum."""
        first = values[0] - sum(values[1:]) if is_added_up else values[0]
        is_skipped = [value > 0 for value in (first, *values[1:])]
        if any(is_skipped):
            self.skipped.append(update)
            self.idle += all(is_skipped)

    def facts(self) -> ScalerFacts:
        scales, skipped = tuple(self.scales), tuple(self.skipped)
        return ScalerFacts(
            initial=self.initial,
            growth=self.growth,
            backoff=self.backoff,
            interval=self.interval,
            updates=self.updates,
            scales=scales,
            skipped=skipped,
            idle=self.idle,
            optimizers=self.optimizers,
            is_static=self.is_static,
        )


class AmpWatch:
    """Follows the scales. Those on a device are read late, without waiting for it."""

    watches = "scales of mixed precision"
    name = "amp"
    facts = AmpFacts

    def __init__(self) -> None:
        self._patches = Patches()
        self._scalers: list[_Scaler] = []
        self._batches: Counter[str] = Counter()
        self._dtype = "float32"
        self._by_hand = 0
        self._autograd, self._kinds = Autograd(), Kinds()

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        torch: Any = sys.modules["torch"]
        self._torch = torch
        self._recorder = recorder
        self._arriving = AsyncScalars(torch)
        self._names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
        self._patches.put(torch.amp.GradScaler, "update", self._update)
        recorder.subscribe("forward", self._forward)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("scale", self._scale)

    def stop(self) -> None:
        """Take the patch out, and read the values that have arrived."""
        self._patches.restore()
        self._arriving.poll()

    def observe(self) -> AmpFacts:
        """Return the dtypes and the scales that were seen."""
        scalers = tuple(scaler.facts() for scaler in self._scalers)
        return AmpFacts(tuple(self._batches.items()), scalers, self._by_hand)

    @staticmethod
    def diagnose(facts: AmpFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return none here: `health` diagnoses scales together with values and optimizers."""
        return ()

    def _forward(self, _module: Any, _args: Any) -> None:
        on = next(iter(autocast_dtypes(self._torch).values()), None)
        self._dtype = self._names.get(on, "float32")

    def _loss(self, tensors: Any) -> None:
        self._batches[self._dtype] += 1
        if self._dtype == "float16" and not self._scalers and self._kinds.of(type(tensors)) == "tensor":
            self._by_hand += _is_scaled(self._autograd.grad_fn(tensors))
        self._arriving.poll()

    def _update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def update(scaler: Any, new_scale: Any = None) -> Any:
            __tracebackhide__ = True
            is_fits = get_ident() == recorder.thread
            found = _found_infinite(scaler) if is_fits else []  # the update forgets them
            result = original(scaler, new_scale)
            if is_fits:
                recorder.emit("scale", scaler, new_scale is not None, found)
            return result

        return update

    def _scale(self, scaler: Any, is_given: bool, found: list[Any]) -> None:
        tensor = attribute_of(scaler, "_scale")
        if tensor is None:  # it is off
            return
        known = next((watched for watched in self._scalers if watched.of() is scaler), None)
        if known is None:
            known = _Scaler(scaler)
            self._scalers.append(known)
        known.updates += 1
        known.is_static |= is_given
        known.optimizers = max(known.optimizers, len(found))
        is_told = bool(found) and (is_given or len(found) > 1) and all(flag.device == tensor.device for flag in found)
        if is_told:
            flags = self._torch.stack([flag.detach().reshape(()) for flag in found])
            self._arriving.read(flags, partial(known.were_infinite, known.updates, not is_given and len(found) > 1))
        self._arriving.read(tensor, partial(known.is_now, known.updates, is_told or is_given))


def _is_scaled(node: Any) -> bool:
    """Say whether the last operations of a loss scaled it.

    A multiplication whose factor cannot be read counts as a scale. The factor lies on a device, or PyTorch is older than 2.9
    and would run the hooks that packed it.
    """
    factor = 1.0
    for _ in range(_DEEPEST):
        name = type(node).__name__
        children = [child for child, _ in node.next_functions if child is not None] if name in _LINEAR else []
        if len(children) != 1:
            break
        if name in _FACTORS:
            is_first = node.next_functions[0][0] is not None
            saved = node._raw_saved_other if is_first else node._raw_saved_self
            if getattr(saved, "unpack_hook", saved) is None and saved.data.is_cpu and saved.data.numel() == 1:
                value = float(saved.data)
                factor *= value if name == _MULTIPLIES else 1 / (value or 1)
            elif name == _MULTIPLIES:
                return True
        (node,) = children
    return abs(factor) >= _SCALED


def _found_infinite(scaler: Any) -> list[Any]:
    """Return for each optimizer the flag that its gradients were not finite; an empty list where one has several flags."""
    states = attribute_of(scaler, "_per_optimizer_states")
    if dict not in mro_of(type(states)):
        return []
    flags = [list(dict.values(state["found_inf_per_device"])) for state in dict.values(states)]
    return [flag for (flag,) in flags] if all(len(each) == 1 for each in flags) else []


def autocast_dtypes(torch: Any) -> dict[str, Any]:
    """Return the types that autocast computes in from here on, by the kind of device; none where it is off.

    These are flags of the thread: no device is opened to read them.
    """
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)}
