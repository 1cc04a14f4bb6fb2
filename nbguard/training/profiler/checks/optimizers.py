"""Optimizers, with gradients before their steps, and the calls that clear them afterwards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from nbguard.libraries import single_optimizers
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.checks.check import AsyncScalars, FitFigures
from nbguard.training.profiler.checks.optimizer_facts import (
    Group,
    OptimizerFacts,
    OptimizersFacts,
    Rates,
    UnusedGradients,
    Values,
    fusible,
    groups_of,
    is_looped,
    stepping,
    torchs,
)
from nbguard.training.profiler.record.model_calls import ModuleSet
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder

_ALWAYS = sys.maxsize
_STEPS_OF_MODEL = 2
"""Steps since a model was called for the first time, until all that are trained with it were called, too."""


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A parameter and its gradient, as they were at a step."""

    parameter: weakref.ref[Any]
    gradient: weakref.ref[Any]
    losses: int  # before the step
    version: int = 0  # of the gradient after the step


class _Optimizer:
    """The observations of one optimizer so far."""

    def __init__(self, optimizer: Any) -> None:
        self.of = weakref.ref(optimizer)
        self.name = name_of(type(torchs(optimizer) or optimizer))
        self.is_learners, self.is_wrapped = torchs(optimizer) is None, torchs(optimizer) is not optimizer
        self.fusible = ""
        self.is_looped = self.is_stateless = self.is_renewed = False
        self.first: weakref.ref[Any] | None = None  # of its parameters
        self.steps = self.cleared = self.cleared_in_place = self.gradient_bytes = self.looks = 0
        self.piled = self.replaced = self.thrown = 0
        self.has_pending = False  # a backward pass came since its last step, and since its gradients were cleared
        self.parameters: frozenset[int] = frozenset()  # ids of all
        self.half_eps: dict[float, int] = {}
        self.without: dict[int, str] = {}  # parameters that had no gradient at any look; "": no model has them
        self.owned: frozenset[int] = frozenset()  # ids of those that a model had at a sample
        self.steps_of_model = 0  # since a model was called for the first time
        self.left = 0  # parameters that a model had, and none that was called since then has any more
        self.sample: _Sample | None = None  # of the last sample
        self.is_cleared = False  # a backward pass's gradients were cleared, and no other has come since
        self.emptied = self.trainable = 0
        self.values = Values()
        self.rates = Rates()

    def facts(self) -> OptimizerFacts:
        return OptimizerFacts(
            name=self.name,
            steps=self.steps,
            cleared=self.cleared,
            cleared_in_place=self.cleared_in_place,
            gradient_bytes=self.gradient_bytes,
            half_eps=tuple(self.half_eps.items()),
            piled=self.piled,
            replaced=self.replaced,
            thrown=self.thrown,
            parameters=len(self.parameters),
            without_gradients=tuple(filter(None, self.without.values())),
            foreign=sum(not name for name in self.without.values()),
            left=self.left,
            trainable=self.trainable,
            emptied=self.emptied,
            changed=self.values.changed,
            unchanged=self.values.unchanged,
            rate=self.rates.facts(),
            looks=self.looks,
            is_learners=self.is_learners,
            fusible=self.fusible,
            is_wrapped=self.is_wrapped and not self.is_learners,
            is_looped=self.is_looped,
            is_stateless=self.is_stateless,
            is_renewed=self.is_renewed,
        )


class OptimizerWatch:
    """Looks at the parameters of each optimizer at its first step, its second, fourth, eighth and so on."""

    watches = "steps of optimizers"
    name = "optimizers"
    facts = OptimizersFacts

    def __init__(self) -> None:
        self._patches = Patches()
        self._optimizers: list[_Optimizer] = []
        self._models = ModuleSet()
        self._current = ModuleSet()  # those that were called since the newest one was
        self._closing: _Optimizer | None = None  # whose step calls a closure, with the backward pass in it
        self._looked_at: list[_Optimizer] = []  # whose gradients the next backward pass may add to
        self._backwards = 0
        self._clears_model = self._is_stepping = False
        self._unused: UnusedGradients | None = None
        self._untaught: tuple[str, ...] = ()
        self._without_optimizer = Values()  # of the parameters with unused gradients: the loop may update them itself
        self._stepless = Values(looks=_ALWAYS)  # of the models, from one backward pass to the next, until anything steps
        self._gradients = 0
        self._schedulers: dict[str, int] = {}
        self._stepped_by = ""
        self._facts: OptimizersFacts | None = None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        torch: Any = sys.modules["torch"]
        self._torch = torch
        self._recorder, self._began = recorder, recorder.losses
        self._arriving = AsyncScalars(torch)
        self._stepping = recorder.code(phase_log.STEP)
        self._patches.put(torch.nn.Module, "zero_grad", self._clear_model)
        for cls in _schedulers(torch):
            self._patches.put(cls, "step", self._schedule)
        recorder.subscribe("model", self._model)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("grad", self._gradient)
        recorder.subscribe("step", self._step)
        recorder.subscribe("phase", self._ended)
        recorder.subscribe("zero_grad", self._zero_grad)

    def stop(self) -> None:
        """Take the patch out, and write the observations down by name."""
        self._patches.restore()
        self._note_untaught()
        self._arriving.poll()
        for known in self._optimizers:
            optimizer = known.of()
            if optimizer is not None and known.looks:
                self._note_left(known, [p for group in groups_of(optimizer) for p in group.parameters if p.requires_grad])
        facts = tuple(optimizer.facts() for optimizer in self._optimizers)
        losses = self._recorder.losses - self._began
        self._facts = OptimizersFacts(
            optimizers=facts,
            backwards=self._backwards,
            clears_model=self._clears_model,
            unused=None if self._without_optimizer.changed else self._unused,
            untaught=self._untaught,
            schedulers=tuple(self._schedulers.items()),
            losses=losses,
            untouched=0 if self._stepless.changed or self._has_stepped() else self._stepless.last,
            gradients=self._gradients,
            stepped_by=self._stepped_by,
        )
        self._optimizers.clear()
        self._looked_at.clear()
        self._models.clear()
        self._current.clear()

    def _has_stepped(self) -> bool:
        """Say whether an optimizer stepped in any batch, sampled or not."""
        boundaries = self._recorder.boundaries(len(self._recorder)) if self._stepless.last else ()
        return any(known.steps for known in self._optimizers) or any(boundary.kind == "step" for boundary in boundaries)

    def _note_untouched(self) -> None:
        """Compare the models' values from one backward pass to the next, as long as nothing steps."""
        if self._recorder.in_learner or any(known.steps for known in self._optimizers) or self._stepless.changed:
            return
        self._stepless.compare(self._torch, self._arriving, self._recorder.losses - self._began)
        self._stepless.keep_stepless(self._torch, [p for model in self._models for p in model.parameters()])

    def _gradient(self) -> None:
        self._gradients += 1

    def _note_untaught(self) -> None:
        """Note the parameters with gradients that no optimizer has, as far as their models are still there.

        Those of models that are trained here count as unused gradients, with their share of all values with gradients.
        """
        used = frozenset(parameter for optimizer in self._optimizers for parameter in optimizer.parameters)
        unused: dict[str, Any] = {}
        untaught: list[str] = []
        sizes = {True: 0, False: 0}
        for model in self._models:
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            untaught += [name for name, p in named if id(p) not in used and p.grad is not None]
            if used.isdisjoint(id(p) for _, p in named):
                continue  # another model, which is not trained here
            for name, p in named:
                if id(p) in used or p.grad is not None:
                    sizes[id(p) in used] += p.numel()
                    unused |= {} if id(p) in used else {name: p}
        if self._models:
            self._unused = UnusedGradients(tuple(unused), sizes[False] / sum(sizes.values())) if unused else None
            self._untaught = tuple(untaught)
            self._without_optimizer.compare(self._torch, self._arriving)
            self._without_optimizer.keep_stepless(self._torch, [*unused.values()])

    def observe(self) -> OptimizersFacts:
        """Return the observations; to be called after `stop`."""
        return self._facts or OptimizersFacts()

    @staticmethod
    def diagnose(facts: OptimizersFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return none here: `health` diagnoses optimizers together with values and scales."""
        return ()

    def _model(self, module: Any, _: Any) -> None:
        if module not in self._models:
            self._models.add(module)
            self._current = ModuleSet()
            for known in self._optimizers:
                known.steps_of_model = 0
        self._current.add(module)

    def _of(self, optimizer: Any) -> _Optimizer:
        for known in self._optimizers:
            if known.of() is optimizer:
                return known
        inner = stepping(optimizer)
        if inner is not optimizer:
            return self._of(inner)
        self._optimizers.append(_Optimizer(optimizer))
        return self._optimizers[-1]

    def _step(self, optimizer: Any) -> None:
        known = self._of(optimizer)
        self._is_stepping = True
        known.steps += 1
        known.steps_of_model += 1
        known.emptied += known.is_cleared
        known.has_pending = known.is_cleared = False
        groups = groups_of(optimizer)
        known.rates.note(groups, self._recorder.losses)
        if self._backwards and (known.steps & (known.steps - 1) == 0 or known.steps_of_model == _STEPS_OF_MODEL):
            if not known.looks:
                self._meet(known, optimizer, groups)
            self._look(known, groups)

    def _meet(self, known: _Optimizer, optimizer: Any, groups: list[Group]) -> None:
        """Note the settings of an optimizer at its first step."""
        parameters = [p for group in groups for p in group.parameters]
        known.half_eps = _half_eps(self._torch, groups)
        known.parameters = frozenset(map(id, parameters))
        known.fusible, known.is_looped = fusible(optimizer, groups), is_looped(optimizer, groups)
        known.is_stateless = known.name == "SGD" and not any(group.settings.get("momentum") for group in groups)
        if len(parameters) == 1 and not self._stepped_by:
            self._stepped_by = next((name for name in _callers() if name in single_optimizers()), "")
        if parameters:
            known.first = weakref.ref(parameters[0])
            others = (other for other in self._optimizers if other is not known and other.name == known.name)
            known.is_renewed = any(other.first is not None and other.first() is parameters[0] for other in others)

    def _look(self, known: _Optimizer, groups: list[Group]) -> None:
        known.looks += 1
        required = [p for group in groups for p in group.parameters if p.requires_grad]
        known.trainable = max(known.trainable, len(required))
        if self._recorder.has_closure:
            self._closing = known
        else:
            self._note_without(known, required)
        self._note_untaught()
        self._note_left(known, required)
        known.values.keep(self._torch, required)
        have = [p for p in required if p.grad is not None and p.grad.layout is self._torch.strided]  # embeddings': sparse
        known.gradient_bytes = sum(p.grad.nbytes for p in have)
        smallest = min(have, key=lambda p: p.grad.numel(), default=None)
        if smallest is not None:
            held, gradient = weakref.ref(smallest), weakref.ref(smallest.grad)
            known.sample = _Sample(parameter=held, gradient=gradient, losses=self._recorder.losses)
            self._looked_at.append(known)

    def _note_without(self, known: _Optimizer, required: list[Any]) -> None:
        """Note the parameters that have had no gradient at any look, where the gradients of a step are there."""
        without = [id(p) for p in required if p.grad is None and (known.looks == 1 or id(p) in known.without)]
        names = {id(p): name for model in self._models for name, p in model.named_parameters()} if without else {}
        known.without = {key: names.get(key) or known.without.get(key, "") for key in without}

    def _note_left(self, known: _Optimizer, parameters: list[Any]) -> None:
        """Note the parameters of an optimizer that no model has any more: it was made again, or a layer of it was."""
        present = {id(p) for model in self._current for p in model.parameters()}
        mine = {id(p) for p in parameters}
        if known.steps_of_model >= _STEPS_OF_MODEL:
            known.left = sum(p.grad is None and id(p) in known.owned - present for p in parameters)
        known.owned = (known.owned | present) & mine

    def _loss(self, _: Any) -> None:
        self._backwards += 1
        for known in self._optimizers:
            known.has_pending, known.is_cleared = True, False
        self._arriving.poll()
        self._note_untouched()
        while self._looked_at:
            known = self._looked_at.pop()
            sample = known.sample
            if sample is not None and self._recorder.losses == sample.losses + 1:  # no batch went unseen between
                self._compare(known, sample)

    def _ended(self, code: int) -> None:
        """After a step, which may itself write to gradients (SGD with Nesterov's momentum), note the gradients left."""
        if code == self._stepping:
            self._is_stepping = False
            if self._closing is not None:
                closing, self._closing = self._closing, None
                groups = groups_of(closing.of())
                self._note_without(closing, [p for group in groups for p in group.parameters if p.requires_grad])
            for known in self._optimizers:
                known.values.compare(self._torch, self._arriving)
            for known in self._looked_at:
                gradient = None if known.sample is None else known.sample.gradient()
                if known.sample is not None and gradient is not None:
                    known.sample.version = gradient._version

    def _compare(self, known: _Optimizer, sample: _Sample) -> None:
        """See whether the gradient that a step has used is still there, and not 0, when a loss is about to add to it.

        One that was written to since is no mistake, as where a loop keeps a part of it for its momentum (`p.grad *= 0.9`).
        """
        parameter, gradient = sample.parameter(), sample.gradient()
        if parameter is None or gradient is None or parameter.grad is not gradient or gradient._version != sample.version:
            known.replaced += 1
        else:
            with self._torch._C.DisableTorchFunction():
                self._arriving.read(self._torch.count_nonzero(gradient), partial(self._count, known))

    def _count(self, known: _Optimizer, values: tuple[float, ...]) -> None:
        if values[0]:
            known.piled += 1
        else:
            known.replaced += 1

    def _zero_grad(self, optimizer: Any, set_to_none: Any) -> None:
        known = self._of(optimizer)
        known.cleared += 1
        if not self._is_stepping:  # a closure's come again
            known.thrown += known.has_pending
            known.is_cleared |= known.has_pending
            if not known.steps and known.values.is_wanted:  # updated by hand, maybe
                known.values.compare(self._torch, self._arriving)
                known.values.keep_stepless(self._torch, [p for group in groups_of(optimizer) for p in group.parameters])
        known.has_pending = False
        known.cleared_in_place += set_to_none is False

    def _clear_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(module: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() == self._recorder.thread:
                self._clears_model = True
                for known in self._optimizers:
                    known.is_cleared |= known.has_pending
            return original(module, *args, **kw)

        return zero_grad

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        counts, recorder = self._schedulers, self._recorder

        def step(scheduler: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() == recorder.thread:
                name = name_of(type(scheduler))
                counts[name] = counts.get(name, 0) + 1
            return original(scheduler, *args, **kw)

        return step


def _callers() -> Iterator[str]:
    """Yield the names of the modules whose functions run here, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _schedulers(torch: Any) -> Iterator[type]:
    """Yield torch's classes of schedulers that have a `step` of their own."""
    for cls in vars(torch.optim.lr_scheduler).values():
        if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and "step" in vars(cls):
            yield cls


def _half_eps(torch: Any, groups: list[Group]) -> dict[float, int]:
    counts: dict[float, int] = {}
    for group in groups:
        eps = group.settings.get("eps")
        count = sum(p.dtype is torch.float16 for p in group.parameters)
        if type(eps) is float and count and group.settings.get("fused") is not True:
            counts[eps] = counts.get(eps, 0) + count
    return counts
