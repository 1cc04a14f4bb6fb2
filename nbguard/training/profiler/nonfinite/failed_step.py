"""A step whose loss or gradients are not finite, while it goes on, with the means to find the operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nbguard.errors import StoppedAtNaN
from nbguard.memory.scan.learners import cancel_of_learners
from nbguard.training.profiler.analysis.nonfinite import NotFinite, Origin, evidence_of, what_of
from nbguard.training.profiler.analysis.operations import FailedOperation
from nbguard.training.profiler.nonfinite.operations.culprit import operation_in_graph, operation_of_hooks
from nbguard.training.profiler.nonfinite.operations.operation_search import OperationSearch
from nbguard.training.profiler.nonfinite.operations.replay import is_finite
from nbguard.training.profiler.nonfinite.operations.source_lines import StepValues, lines_of
from nbguard.training.profiler.nonfinite.origin import origin_of_backward
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, ModuleCounters, NotPossibleError


def models_of(calls: list[ForwardCall]) -> list[Any]:
    """Return the models of calls, as far as they are there."""
    return [module for call in calls if (module := call.module()) is not None]


def arguments_of(calls: list[ForwardCall]) -> list[Any]:
    """Return the arguments of calls, None for each of a call whose are not all there."""
    arguments: list[Any] = []
    for call in calls:
        try:
            arguments.extend(call.inputs())
        except NotPossibleError:
            arguments.extend([None] * len(call.args))
    return arguments


def stopped_by(first: NotFinite, *, is_of_learner: bool) -> Exception:
    """Return the exception that stops a fit at its first value that is not finite. A Learner's fit is cancelled."""
    words = f"{what_of(first)}: {evidence_of(first.origin)}"
    if is_of_learner:
        return cancel_of_learners()(words)
    return StoppedAtNaN(f"{words}. The parameters have their values from before this step")


@dataclass(slots=True, kw_only=True)
class FailedStep:
    """A step, as it is met where its loss or its gradients are examined."""

    origin: Origin  # as far as it is known
    calls: list[ForwardCall]  # that led to its loss
    counters: ModuleCounters  # of their models
    is_last: bool  # the fit ends here
    loss: Any = None  # that is not finite
    broken: list[Any] = field(default_factory=list)  # parameters whose gradients are not finite
    were_finite: bool | None = None  # these gradients, after the backward pass; None if unknown

    def look_for_operation(self, torch: Any, search: OperationSearch, found: Callable[[Origin], None]) -> None:
        """Find the operation where only the kind of code is known: now, else in the steps that follow if there are any."""
        if self.origin.kind == "step":
            parameters = (parameter for model in models_of(self.calls) for parameter in model.parameters())
            hooked = operation_of_hooks(parameter for parameter in parameters if not is_finite(parameter))
            found(replace(self.origin, operation=hooked))
            search.end()
            return
        is_known = self._is_known(torch, search, found)
        if is_known or self.is_last:
            search.end()
            return
        weights = (parameter for model in models_of(self.calls) for parameter in model.parameters())
        search.follow(StepValues(arguments_of(self.calls), weights), found)

    def _is_known(self, torch: Any, search: OperationSearch, found: Callable[[Origin], None]) -> bool:
        """Tell of the operation, or the data, if this step alone leads to it; else of the known facts."""
        models = models_of(self.calls)
        if self.loss is not None and self.origin.kind in ("loss", "unknown"):
            operation = self._operation_in_graph(search)
            if operation is not None:
                found(replace(self.origin, kind="loss", operation=operation))
        values = StepValues(arguments_of(self.calls), ())
        origin = search.now(values, models, self.broken, were_finite=self.were_finite)
        if self.origin.kind == "gradient" and (origin is None or origin.operation is None):
            origin = origin_of_backward(torch, self.calls, self.counters, search.allowance)
        if origin is None:
            return False
        found(origin)
        return origin.operation is not None or origin.kind in ("input", "target")

    def _operation_in_graph(self, search: OperationSearch) -> FailedOperation | None:
        """Return the operation that the loss's graph knows.

        Its line is the only one of the user's code that has it; or that which has led to it in a library, in the step that was
        recorded.
        """
        known = operation_in_graph(self.loss)
        if known is None or not known[1]:
            return known and known[0]
        lines = lines_of(known[0].name, models_of(self.calls))
        if lines is not None:
            lines = lines or search.lines_of(known[0].name)
        return replace(known[0], line=lines.pop()) if lines and len(lines) == 1 else known[0]
