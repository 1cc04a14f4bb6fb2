"""Autograd graphs that cost memory and serve nothing: kept after a backward pass, or recorded by calls without one."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.graph_scan import GraphScan, look_at, tensors_of
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.model_calls import CallLines, ModuleSet
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import counted, format_bytes

# --- Backward passes that keep their graph, `retain_graph=True`, where no second one goes through it


_ENOUGH = 4
"""Backward passes without a second pass that make the finding."""
_LOOKS_AT_PASSES = 12
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
        evidence=f"in {facts.unused} of {facts.passes} batches seen, the {format_bytes(facts.nbytes)} that the graph saved "
        "stayed in memory while the optimizer stepped and the next batch was computed",
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
        if self._passes >= _LOOKS_AT_PASSES:
            self._recorder.unsubscribe("loss", self._before)
            self._recorder.unsubscribe("backward", self._after)
            self._recorder.unsubscribe("grad", self._followed)


# --- unused graphs


_IN_ROW = 2
"""Calls of one line without a loss between, that get a model in eval mode examined;"""
_IN_TRAIN_MODE = 3
"""and one in train mode."""
_LOOKS = 6
"""Calls of a line whose graphs are examined."""
_LINES = 16
"""Lines that are kept apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedGraphs:
    """A line that calls a model, and its graphs that were examined and freed unused."""

    where: str  # e.g. "In[6], line 6 in evaluate()"
    function: str  # that the line is in; empty for a cell's own
    model: str  # its class
    calls: int  # one after the other without a loss to train on, at most
    nbytes: int  # that the graph of a call has saved, at most


@dataclass(frozen=True, slots=True)
class UnusedFacts:
    """The lines whose graphs were not used."""

    lines: tuple[UnusedGraphs, ...] = ()


def unused_findings(facts: UnusedFacts) -> Iterable[FitFinding]:
    """Yield the lines, those whose graphs take most first."""
    for line in sorted(facts.lines, key=lambda line: -line.nbytes):
        decorated = f", or `@torch.no_grad()` above `def {line.function}`" if line.function else ""
        yield FitFinding(
            kind="no_grad",
            severity="advice",
            what=f"{line.where} builds graphs that no backward pass uses",
            evidence=f"{counted(line.calls, 'call')} of {line.model} with gradients enabled: each keeps "
            f"{format_bytes(line.nbytes)} of activations until its outputs are freed",
            change=f"`with torch.no_grad():` around it{decorated}",
            nbytes=line.nbytes or None,
        )


_Line = tuple[str, int, str]


@dataclass(slots=True, kw_only=True)
class _Calls:
    """Calls of one line."""

    model: str
    row: int = 0  # since the last loss
    longest: int = 0
    looks: int = 0
    waiting: list[GraphScan] = field(default_factory=list)  # of calls whose graphs may still be used
    freed: int = 0  # graphs that were freed with no pass through them
    nbytes: int = 0  # of one of these
    used: bool = False  # a pass went through one, or may have


class UnusedGraphWatch:
    """Looks at the graphs of models that are called again and again without a loss, and whether they are freed unused."""

    watches = "graphs of evaluations"
    name = "unused graphs"
    facts = UnusedFacts

    def __init__(self) -> None:
        self._lines: dict[_Line, _Calls] = {}
        self._seen, self._trainable = ModuleSet(), ModuleSet()
        self._is_recorded = self._is_training = False
        self._given: list[weakref.ref[Any]] = []  # tensors that the call has got

    def start(self, recorder: Recorder) -> None:
        """Wait for calls of models."""
        self._torch: Any = sys.modules["torch"]
        self._recorder = recorder
        self._places = CallLines()
        recorder.subscribe("forward", self._forward)
        recorder.subscribe("output", self._output)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("grad", self._used)

    def stop(self) -> None:
        """Count the graphs freed by now."""
        self._settle()
        for calls in self._lines.values():
            calls.waiting.clear()

    def observe(self) -> UnusedFacts:
        """Return the lines whose graphs were not used; to be called after `stop`."""
        sites = Sites()
        return UnusedFacts(
            tuple(
                UnusedGraphs(
                    where=sites.line(*line),
                    function="" if line[-1].startswith("<") else line[-1],
                    model=calls.model,
                    calls=calls.longest,
                    nbytes=calls.nbytes,
                )
                for line, calls in self._lines.items()
                if calls.freed and not calls.used
            )
        )

    @staticmethod
    def diagnose(facts: UnusedFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return the lines whose graphs were not used."""
        return unused_findings(facts)

    def _forward(self, module: Any, args: Any) -> None:
        torch = self._torch
        is_recorded = torch.is_grad_enabled() and not torch._C._functorch.maybe_current_level()
        if is_recorded and module not in self._seen:
            self._seen.add(module)
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._trainable.add(module)
        self._is_training = bool(module.training)
        given = tensors_of(tuple(args))
        self._is_recorded = is_recorded and module in self._trainable and not any(each.requires_grad for each in given)
        self._given = [weakref.ref(each) for each in given] if self._is_recorded else []
        self._model = name_of(type(module))

    def _output(self, result: Any) -> None:
        if not self._is_recorded:
            return
        self._is_recorded = False
        line = self._places.here()
        if line is None or (line not in self._lines and len(self._lines) >= _LINES):
            return
        calls = self._lines.setdefault(line, _Calls(model=self._model))
        calls.row += 1
        calls.longest = max(calls.longest, calls.row)
        self._settle(calls)
        is_due = calls.row >= (_IN_TRAIN_MODE if self._is_training else _IN_ROW)
        if is_due and calls.looks < _LOOKS and not calls.used:
            calls.looks += 1
            given = (each() for each in self._given)
            look = look_at(tensors_of(result), [each for each in given if each is not None])
            if look is not None and look.largest is not None:
                calls.waiting.append(look)

    def _settle(self, *which: _Calls) -> None:
        """Count the graphs that have been freed."""
        for calls in which or self._lines.values():
            for look in calls.waiting:
                if look.largest.expired():
                    calls.freed += 1
                    calls.nbytes = max(calls.nbytes, look.nbytes)
            calls.waiting = [look for look in calls.waiting if not look.largest.expired()]

    def _loss(self, tensors: Any) -> None:
        """See which graphs a backward pass will go through, before it frees them."""
        self._settle()
        waiting = [calls for calls in self._lines.values() if calls.waiting]
        if waiting:
            look = look_at(tensors_of(tensors))
            for calls in waiting:
                calls.used |= look is None or any(not look.operations.isdisjoint(each.operations) for each in calls.waiting)
        for calls in self._lines.values():
            calls.row = 0

    def _used(self) -> None:
        """Take all graphs that still wait for used: `torch.autograd.grad` goes through some."""
        self._settle()
        for calls in self._lines.values():
            calls.used |= bool(calls.waiting) or calls.row > 0
