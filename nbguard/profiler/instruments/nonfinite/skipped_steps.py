"""Steps that a GradScaler skips one after the other, and the operation behind them."""

from __future__ import annotations

from typing import Any

from nbguard.profiler.analysis.health.nonfinite import Origin
from nbguard.profiler.instruments.nonfinite.operations.operation_search import OperationSearch
from nbguard.profiler.instruments.nonfinite.operations.step_values import StepValues

_PERSISTS = (3, 12)
"""Steps skipped in a row after which the operation is looked for: by the second time a scale has fallen far enough."""


class SkippedSteps:
    """Counts the steps that are skipped in a row, and looks for the operation once that is no search for the scale's level.

    `origin`: of their gradients; None: none, or not known.
    """

    def __init__(self, search: OperationSearch) -> None:
        self.origin: Origin | None = None
        self._search = search
        self._count = 0

    def note(self, models: list[Any], values: tuple[float, ...]) -> None:
        """Note for each optimizer whether its gradients were not finite (1.0), as the scaler's flags say."""
        self._count = self._count + 1 if any(values) else 0
        if self._count not in _PERSISTS:
            return
        if self._search.records_each:
            self.origin = self._search.now(StepValues.none(), models) or self.origin
        else:
            self._search.follow(StepValues.none(), self._is)

    def _is(self, origin: Origin) -> None:
        self.origin = origin
