"""The health of a fit: the findings of all instruments that look at it, the worst first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nbguard.profiler.analysis.health.amp import AmpFacts, amp_findings, consequences
from nbguard.profiler.analysis.health.fp16_range import RangeFacts, range_findings
from nbguard.profiler.analysis.health.nonfinite import FiniteFacts, nan_findings
from nbguard.profiler.analysis.health.optimizers import OptimizersFacts, optimizer_findings
from nbguard.profiler.analysis.health.switches import SwitchFacts, switch_findings
from nbguard.profiler.analysis.health.syncs import SyncFacts, sync_findings
from nbguard.profiler.analysis.health.untrained import untrained_findings
from nbguard.profiler.analysis.report import FitFinding, gravest_first
from nbguard.profiler.analysis.time import phases

_NOT_FINITE = ("nan", "data")
"""Kinds of findings on values for which a GradScaler skips steps and lowers its scale."""


def health(
    finite: FiniteFacts,
    amp: AmpFacts,
    optimizers: OptimizersFacts,
    syncs: SyncFacts,
    switches: SwitchFacts,
    step: int | None = None,
    times: Mapping[str, int] | None = None,
    fp16: RangeFacts | None = None,
    gainable: int | None = None,
) -> tuple[FitFinding, ...]:
    """Return the findings on health.

    `step`: the median of a batch in nanoseconds, to judge the cost of waiting. `times`: the same of its phases, by name.
    `fp16`: the looks at float16's range. `gainable`: nanoseconds of a batch that the program can save.
    """
    times = times or {}
    work = sum(times.get(phase, 0) for phase in (phases.FORWARD, phases.LOSS, phases.BACKWARD))
    broken = _broken(finite, amp, optimizers, times)
    nan = next((finding for finding in broken if finding.kind in _NOT_FINITE and finding.severity == "problem"), None)
    made_by = None if nan is not None or finite.course.scaled is None else finite.course.scaled.operation
    of_scales = amp_findings(amp, nan, len(optimizers.optimizers), made_by)
    is_idle = any(finding.kind == "not trained" for finding in of_scales)
    if nan is not None and any(nan.what in finding.what for finding in of_scales):
        broken = tuple(finding for finding in broken if finding is not nan)  # it is said as the cause
    elif nan is not None and (followed := consequences(amp)):
        said = replace(nan, evidence=f"{nan.evidence}; from then on {followed}")
        broken = tuple(said if finding is nan else finding for finding in broken)
    findings = [
        *(finding for finding in of_scales if finding.kind == "not trained"),
        *broken,
        *(finding for finding in of_scales if finding.kind != "not trained"),
        *(() if is_idle else range_findings(fp16 or RangeFacts())),  # gradients of steps that were all skipped say nothing
        *switch_findings(switches, work),
        *sync_findings(syncs, step, gainable),
    ]
    return gravest_first(findings)


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
