"""The health of a fit, with the findings of all checks, the worst first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.health.nonfinite import FiniteFacts, nan_findings
from nbguard.training.profiler.analysis.health.untrained import untrained_findings
from nbguard.training.profiler.analysis.report import FitFinding, gravest_first
from nbguard.training.profiler.checks.amp import AmpFacts, amp_findings, consequences
from nbguard.training.profiler.checks.check import FitFigures, facts_of
from nbguard.training.profiler.checks.optimizer_facts import OptimizersFacts, optimizer_findings

_NOT_FINITE = ("nan", "data")
"""Kinds of findings on values that make a GradScaler skip steps and lowers its scale."""


def health(finite: FiniteFacts, checks: Collection[object], fit: FitFigures) -> tuple[FitFinding, ...]:
    """Return the findings of all checks, from their facts: those on values, scales and optimizers first."""
    of_values = tuple(_of_values(finite, facts_of(checks, AmpFacts), facts_of(checks, OptimizersFacts), fit.times))
    fit = replace(fit, kinds=frozenset(finding.kind for finding in of_values))
    others = (finding for check in fit_checks.CHECKS for finding in check.judge(facts_of(checks, check.facts), fit))
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
