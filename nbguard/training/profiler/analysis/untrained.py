"""The health of a fit by all checks, and the findings on fits that train nothing or only a part. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.nonfinite import FiniteFacts, nan_findings
from nbguard.training.profiler.analysis.report import FitFinding, gravest_first
from nbguard.training.profiler.checks.amp import AmpFacts, amp_findings, consequences
from nbguard.training.profiler.checks.check import FitFigures, facts_of
from nbguard.training.profiler.checks.optimizer_facts import OptimizerFacts, OptimizersFacts, optimizer_findings
from nbguard.units import counted

_LOOKS = 2
"""At gradients before steps; the second comes at the second step."""
_UNCHANGED = 5
"""Looks without a change: the fifth comes at step 16."""
_STEPS = 16
_MUCH = 0.25
"""Share of the batches that a fit goes on with a learning rate that is too small."""
_OFTEN = 0.5
"""Least steps per batch of schedulers that step per batch."""
_SHOWN = 3


def untrained_findings(facts: OptimizersFacts, *, is_scaled: bool = False) -> tuple[FitFinding, ...]:
    """Return the reasons why nothing is trained, one for each optimizer. `is_scaled`: a GradScaler may leave steps out."""
    return tuple(finding for optimizer in facts.optimizers for finding in _first(optimizer, facts, is_scaled))


def _first(optimizer: OptimizerFacts, facts: OptimizersFacts, is_scaled: bool) -> Iterator[FitFinding]:
    """Yield the gravest reason."""
    for reason in (_without_gradients, _left_behind, _replaced, _frozen, _rate, *(() if is_scaled else (_unchanged,))):
        found = reason(optimizer, facts)
        if found is not None:
            yield found
            return


def _finding(what: str, evidence: str, change: str) -> FitFinding:
    return FitFinding(kind="not trained", severity="problem", what=what, evidence=evidence, change=change)


def _make(optimizer: OptimizerFacts) -> str:
    return f"`{optimizer.name}(model.parameters(), …)`" if not optimizer.is_learners else "the Learner"


def _without_gradients(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer without gradients for any of its parameters."""
    without = len(optimizer.without_gradients) + optimizer.foreign
    if optimizer.looks < _LOOKS or not optimizer.trainable or without < optimizer.trainable:
        return None
    count = counted(without, "parameter")
    if optimizer.emptied * 2 > optimizer.steps:
        return _finding(
            f"{optimizer.name} trains nothing because `zero_grad` runs between the backward pass and the step",
            f"at {optimizer.emptied} of {counted(optimizer.steps, 'step')} its {count} no longer had a gradient",
            "`optimizer.zero_grad()` before `loss.backward()`, or after the step",
        )
    if optimizer.foreign == optimizer.trainable:
        others = f"; gradients reached {_shown(facts.untaught)}, which no optimizer has" if facts.untaught else ""
        return _finding(
            f"{optimizer.name} trains nothing: none of its {count} is in a model that ran",
            f"none of them ever had a gradient{others}; a model or layer was recreated after the optimizer",
            f"make the optimizer after the model and its layers: {_make(optimizer)}",
        )
    return _finding(
        f"{optimizer.name} trains nothing: none of its {count} ever gets a gradient",
        f"{counted(optimizer.steps, 'step')} seen, and the loss does not depend on {_shown(optimizer.without_gradients)}",
        "look for `.detach()`, `.data`, `.item()`, NumPy or `torch.no_grad()` between the model and the loss",
    )


def _left_behind(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer that has trained a model, and goes on to step where another one runs."""
    if not optimizer.left or optimizer.left < optimizer.trainable or not facts.untaught:
        return None
    return _finding(
        f"{optimizer.name} no longer trains anything; none of its {counted(optimizer.left, 'parameter')} is in the model that "
        "runs now",
        f"they belong to the previous model; gradients reached {_shown(facts.untaught)}, which no optimizer has",
        f"make the optimizer after the model and its layers: {_make(optimizer)}",
    )


def _replaced(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on a part of a model that was replaced after the optimizer was made."""
    unused, gone = facts.unused, optimizer.foreign + optimizer.left
    if optimizer.looks < _LOOKS or not gone or unused is None:
        return None
    since = "that never got a gradient" if optimizer.foreign else "that no longer get a gradient"
    return _finding(
        f"{_shown(unused.parameters)} {'is' if len(unused.parameters) == 1 else 'are'} not trained: the optimizer was made "
        "before that layer",
        f"{counted(len(unused.parameters), 'parameter')} with gradients in no optimizer; {optimizer.name} has "
        f"{gone} that no model has and {since}",
        f"make the optimizer after the last change to the model: {_make(optimizer)}",
    )


def _frozen(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer that steps though all its parameters are frozen.

    Where another one trains they may be frozen on purpose; then this one is not needed.
    """
    if optimizer.looks < _LOOKS or optimizer.trainable or not optimizer.parameters:
        return None
    if any(other.trainable for other in facts.optimizers):
        found = _finding(
            f"{optimizer.name} trains nothing: {counted(optimizer.parameters, 'parameter')}, all frozen",
            f"`requires_grad` was False for all of them whenever they were checked, and it steps; "
            f"{', '.join(sorted({other.name for other in facts.optimizers if other.trainable}))} trains others",
            "`requires_grad_(True)` for that part if it should learn; otherwise remove its optimizer",
        )
        return replace(found, kind="frozen", severity="advice")
    others = f"; gradients reached {_shown(facts.untaught)}, which no optimizer has" if facts.untaught else ""
    return _finding(
        f"{optimizer.name} trains nothing: {counted(optimizer.parameters, 'parameter')}, all frozen",
        f"`requires_grad` is False for all of them{others}",
        "`model.requires_grad_(True)`, or only for the part that should learn",
    )


def _rate(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on a learning rate that is 0, or has become too small long before the end."""
    rate = optimizer.rate
    if rate is None or rate.steps < _STEPS:
        return None
    if not rate.highest:
        return _finding(
            f"{optimizer.name} trains nothing: its learning rate is 0",
            f"at all {rate.steps} sampled steps",
            f"`{optimizer.name}(…, lr=1e-3)`, or another rate" if not optimizer.is_learners else "`learn.fit(1, 1e-3)`",
        )
    by_batch = [name for name, calls in facts.schedulers if calls >= _OFTEN * facts.losses]
    small = rate.small if by_batch else rate.negligible
    if small < _MUCH * rate.batches:
        return None
    if by_batch:
        change = f"`scheduler.step()` once per epoch, or settings of `{by_batch[0]}` that count batches"
        evidence = f"`{by_batch[0]}.step()` was called {dict(facts.schedulers)[by_batch[0]]} times for {facts.losses} losses"
    else:
        change, evidence = "check the learning rate schedule", f"the highest was {rate.highest:g}"
    return _finding(
        f"the learning rate falls from {rate.highest:g} to {rate.last:.2g}: {small} of {rate.batches} batches train nothing",
        evidence,
        change,
    )


def _unchanged(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on steps that change nothing, for whatever reason: of one optimizer alone a dead layer may be it."""
    if not optimizer.steps or optimizer.unchanged < _UNCHANGED or any(other.changed for other in facts.optimizers):
        return None
    rate = "" if optimizer.rate is None else f", with a learning rate of {optimizer.rate.last:g}"
    if optimizer.emptied * 2 > optimizer.steps:
        change = "`optimizer.zero_grad()` before `loss.backward()`, or after the step"
        cause = " because `zero_grad` runs between the backward pass and the step"
    else:
        change, cause = (
            "look for gradients that are all 0, and for a learning rate that is too small for the parameters' dtype",
            "",
        )
    return _finding(
        f"{optimizer.name} trains nothing: its steps change no value{cause}",
        f"compared before and after {optimizer.unchanged} steps{rate}",
        change,
    )


def _shown(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


# --- The health of a fit, with the findings of all checks, the worst first.


_NOT_FINITE = ("nan", "data")
"""Kinds of findings on values that make a GradScaler skip steps and lowers its scale."""


def health(finite: FiniteFacts, checks: Collection[object], fit: FitFigures) -> tuple[FitFinding, ...]:
    """Return the findings of all checks, from their facts: those on values, scales and optimizers first."""
    of_values = tuple(_of_values(finite, facts_of(checks, AmpFacts), facts_of(checks, OptimizersFacts), fit.times))
    fit = replace(fit, kinds=frozenset(finding.kind for finding in of_values))
    others = (finding for check in fit_checks.CHECKS for finding in check.diagnose(facts_of(checks, check.facts), fit))
    return gravest_first((*of_values, *others))


def _of_values(
    finite: FiniteFacts, amp: AmpFacts, optimizers: OptimizersFacts, times: Mapping[str, int]
) -> Iterator[FitFinding]:
    broken = _broken(finite, amp, optimizers, times)
    nan = next((finding for finding in broken if finding.kind in _NOT_FINITE and finding.severity == "problem"), None)
    made_by = None if nan is not None or finite.course.scaled is None else finite.course.scaled.operation
    of_scales = amp_findings(amp, nan, len(optimizers.optimizers), made_by)
    if nan is not None and any(nan.what in finding.what for finding in of_scales):
        broken = tuple(finding for finding in broken if finding is not nan)  # it is said as the cause
    elif nan is not None and (followed := consequences(amp)):
        said = replace(nan, evidence=nan.evidence + f"; from then on {followed}")
        broken = tuple(said if finding is nan else finding for finding in broken)
    yield from (finding for finding in of_scales if finding.kind == "not trained")
    yield from broken
    yield from (finding for finding in of_scales if finding.kind != "not trained")


def _broken(
    finite: FiniteFacts, amp: AmpFacts, optimizers: OptimizersFacts, times: Mapping[str, int]
) -> tuple[FitFinding, ...]:
    """Return NaN and the mistakes with optimizers. An eps of 0 that breaks a parameter comes before the NaN that it makes."""
    scale = max((scaler.initial for scaler in amp.scalers), default=None)
    nan = nan_findings(finite, scale, in_float16=bool(amp.in_dtype("float16")))
    mistakes = optimizer_findings(optimizers, is_scaled=bool(amp.scalers), times=times)
    is_by_step = finite.first is not None and finite.first.origin.kind == "step"
    mistakes = (*untrained_findings(optimizers, is_scaled=bool(amp.scalers)), *mistakes)
    causes = tuple(finding for finding in mistakes if finding.kind == "eps" and is_by_step)
    return (*causes, *nan, *(finding for finding in mistakes if finding not in causes))
