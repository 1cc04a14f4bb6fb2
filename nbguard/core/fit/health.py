"""Whether a fit is healthy: the findings of all parts that look at it, the worst first."""

from __future__ import annotations

from nbguard.core.fit.amp import AmpFacts, amp_findings
from nbguard.core.fit.nans import FiniteFacts, nan_findings
from nbguard.core.fit.optimizers import OptimizersFacts, optimizer_findings
from nbguard.core.fit.report import SEVERITIES, FitFinding
from nbguard.core.fit.switches import SwitchFacts, switch_findings
from nbguard.core.fit.syncs import SyncFacts, sync_findings


def health(
    finite: FiniteFacts,
    amp: AmpFacts,
    optimizers: OptimizersFacts,
    syncs: SyncFacts,
    switches: SwitchFacts,
    step: int | None = None,
) -> tuple[FitFinding, ...]:
    """Return what stands out. `step`: the median of a batch in nanoseconds, to judge what waiting costs."""
    found = [
        *nan_findings(finite),
        *optimizer_findings(optimizers, is_scaled=bool(amp.scalers)),
        *amp_findings(amp),
        *switch_findings(switches),
        *sync_findings(syncs, step),
    ]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
