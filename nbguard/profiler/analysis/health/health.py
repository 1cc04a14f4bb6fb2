"""The health of a fit: the findings of all instruments that look at it, the worst first."""

from __future__ import annotations

from nbguard.profiler.analysis.health.amp import AmpFacts, amp_findings
from nbguard.profiler.analysis.health.nonfinite import FiniteFacts, nan_findings
from nbguard.profiler.analysis.health.optimizers import OptimizersFacts, optimizer_findings
from nbguard.profiler.analysis.health.switches import SwitchFacts, switch_findings
from nbguard.profiler.analysis.health.syncs import SyncFacts, sync_findings
from nbguard.profiler.analysis.report import SEVERITIES, FitFinding


def health(
    finite: FiniteFacts,
    amp: AmpFacts,
    optimizers: OptimizersFacts,
    syncs: SyncFacts,
    switches: SwitchFacts,
    step: int | None = None,
) -> tuple[FitFinding, ...]:
    """Return what stands out. `step`: the median of a batch in nanoseconds, to judge what waiting costs."""
    findings = [
        *nan_findings(finite),
        *optimizer_findings(optimizers, is_scaled=bool(amp.scalers)),
        *amp_findings(amp),
        *switch_findings(switches),
        *sync_findings(syncs, step),
    ]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
