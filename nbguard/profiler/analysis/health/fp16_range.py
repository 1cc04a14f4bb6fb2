"""The range of float16: activations that come near its end, and gradients that fall below its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.profiler.analysis.health.float32 import LARGEST, module_words
from nbguard.profiler.analysis.report import FitFinding
from nbguard.units import counted

SMALLEST_NORMAL = 2.0**-14
"""Smallest float16 with all of its digits; below it they get fewer, and below 6e-8 a value is 0."""
_NEAR = 0.25
"""Share of float16's largest number from which on a warning is due: two more doublings, and it is infinite."""
_LOST = 0.3
"""Share of zeros among values that neither a dead row nor a dead column explains."""
_COARSE = 0.5
"""Share of the other values that are that small: a few always are."""


@dataclass(frozen=True, slots=True)
class LargestActivation:
    """The largest magnitude that a layer returned in float16, of the batches that were looked at."""

    layer: str  # its name in the model; "": the model
    value: float  # magnitude
    type: str = ""  # of the layer; "": not known


@dataclass(frozen=True, slots=True)
class LostGradients:
    """The zeros of one parameter's gradient, in the step in which they were most."""

    parameter: str  # its name in the model; "": not known
    zeros: float  # share, of the values whose row and column have others than zeros
    coarse: float  # share of the others that lie below float16's smallest number with all digits, by the scale of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFacts:
    """The looks at float16's range during a fit."""

    batches: int = 0  # in which the activations were looked at
    steps: int = 0  # before which gradients were looked at
    largest: LargestActivation | None = None  # None: nothing computed in float16
    lost: LostGradients | None = None  # None: no gradient was looked at that had others than zeros
    gradients: int = 0  # of parameters, that were looked at
    empty: int = 0  # of them: those that were zero throughout


def range_findings(facts: RangeFacts) -> tuple[FitFinding, ...]:
    """Return a warning where a layer comes near the end of float16's range, and where gradients vanish."""
    return (*_near_the_end(facts), *_vanishing(facts))


def _near_the_end(facts: RangeFacts) -> Iterator[FitFinding]:
    largest, limit = facts.largest, LARGEST["float16"]
    if largest is None or largest.value < _NEAR * limit:
        return
    layer = module_words(largest.layer, largest.type)
    yield FitFinding(
        kind="range",
        severity="advice",
        what=f"{layer} comes close to the limit of float16; it returned up to {largest.value:,.0f} of {limit:,.0f}",
        evidence=f"the largest magnitude in {facts.batches} sampled batches; above the limit it is infinite",
        change=(
            "compute in bfloat16, or normalise the layer's input; `--stop-on-nan` stops before infinity reaches the parameters"
        ),
    )


def _vanishing(facts: RangeFacts) -> Iterator[FitFinding]:
    lost, what = facts.lost, ""
    is_coarse = lost is not None and lost.coarse >= _COARSE
    if lost is not None and is_coarse and lost.zeros >= _LOST:
        parameter = f"`{lost.parameter}`" if lost.parameter else "a parameter"
        what = f"{lost.zeros:.0%} of the gradient of {parameter} are zero because float16 is too coarse for it"
    elif facts.empty and (is_coarse or facts.empty == facts.gradients):
        what = f"{facts.empty} of {facts.gradients} sampled gradients are all zero because float16 is too coarse"
    if what:
        others = "" if lost is None else f"{lost.coarse:.0%} of the other values lie below {SMALLEST_NORMAL:.1e}; "
        yield FitFinding(
            kind="range",
            severity="advice",
            what=what,
            evidence=f"{others}there float16 loses digits, and below 6e-8 all of them (seen in {counted(facts.steps, 'step')})",
            change="a larger scale of the loss (`torch.amp.GradScaler(init_scale=2.0**20)`), or bfloat16",
        )
