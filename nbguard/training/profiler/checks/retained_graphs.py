"""Backward passes that keep their graph, `retain_graph=True`, where no second one goes through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.graph_scan import GraphScan, look_at, tensors_of
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.call_lines import CallLines
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import format_bytes

_ENOUGH = 4
"""Backward passes without a second pass that make the finding."""
_LOOKS = 12
"""Backward passes that are examined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedFacts:
    """The backward passes that kept their graph for nothing."""

    where: str = ""  # line of the backward pass
    passes: int = 0  # that were sampled
    unused: int = 0  # of them, whose graph no later pass went through
    nbytes: int = 0  # that the graph of one has saved, at most


def retained_finding(facts: RetainedFacts) -> Iterable[FitFinding]:
    """Yield the line, if every examined pass kept its graph for nothing."""
    if facts.unused < _ENOUGH or facts.unused < facts.passes:
        return
    yield FitFinding(
        kind="retain_graph",
        severity="advice",
        what=f"{facts.where} calls `backward(retain_graph=True)`, and no second backward pass uses the graph",
        evidence=f"in {facts.unused} of {facts.passes} batches seen: the {format_bytes(facts.nbytes)} that it has saved stay "
        "while the optimizer steps and the next batch is computed",
        change="`loss.backward()`",
        nbytes=facts.nbytes,
    )


class RetainWatch:
    """Looks at the graphs of backward passes that keep them, and whether the next ones go through the same."""

    watches = "kept graphs"
    name = "retained graphs"
    facts = RetainedFacts

    def __init__(self) -> None:
        self._loss: GraphScan | None = None  # look at the graph of the loss whose backward pass runs, before it does
        self._kept: GraphScan | None = None  # of the pass before, if it kept its graph
        self._line: tuple[str, int, str] | None = None
        self._passes = self._unused = self._nbytes = 0

    def start(self, recorder: Recorder) -> None:
        """Wait for losses and their backward passes."""
        self._recorder = recorder
        self._lines = CallLines()
        recorder.subscribe("loss", self._before)
        recorder.subscribe("backward", self._after)
        recorder.subscribe("grad", self._followed)

    def stop(self) -> None:
        """Count the last pass, which nothing has followed."""
        self._unused += self._kept is not None
        self._kept = self._loss = None

    def observe(self) -> RetainedFacts:
        """Return the observations; to be called after `stop`."""
        if self._line is None:
            return RetainedFacts()
        where = Sites().line(*self._line)
        return RetainedFacts(where=where, passes=self._passes, unused=self._unused, nbytes=self._nbytes)

    @staticmethod
    def diagnose(facts: RetainedFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return the line that keeps graphs for nothing."""
        return retained_finding(facts)

    def _before(self, tensors: Any) -> None:
        if self._recorder.retains or self._kept is not None:
            self._loss = look_at(tensors_of(tensors))
        if self._kept is not None:
            self._unused += self._loss is not None and self._kept.operations.isdisjoint(self._loss.operations)
            self._kept = None

    def _followed(self) -> None:
        """Take the graph that was kept for used: `torch.autograd.grad` may go through it."""
        self._kept = None

    def _after(self) -> None:
        look, self._loss = self._loss, None
        if look is None or not self._recorder.retains:
            return
        self._passes += 1
        self._kept = look
        self._nbytes = max(self._nbytes, look.nbytes)
        self._line = self._lines.here()
        if self._passes >= _LOOKS:
            self._recorder.unsubscribe("loss", self._before)
            self._recorder.unsubscribe("backward", self._after)
            self._recorder.unsubscribe("grad", self._followed)
