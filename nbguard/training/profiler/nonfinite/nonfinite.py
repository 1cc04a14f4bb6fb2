"""NaN and infinity, with the first loss or gradient that is not finite, and the layer that made it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nbguard.errors import StoppedAtNaN
from nbguard.memory.scan.heap.kinds import attribute_of, name_of
from nbguard.memory.scan.learners import cancel_of_learners
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.nonfinite import (
    FiniteFacts,
    LossCourse,
    LossGrowth,
    LossJump,
    NotFinite,
    Origin,
    evidence_of,
    what_of,
)
from nbguard.training.profiler.analysis.operations import FailedOperation
from nbguard.training.profiler.checks.check import AsyncScalars
from nbguard.training.profiler.checks.optimizer_facts import groups_of
from nbguard.training.profiler.instruments.growth_watch import operations_so_far
from nbguard.training.profiler.nonfinite.device_losses import DeviceLosses, LossHistory, largest_parameter, peak_of
from nbguard.training.profiler.nonfinite.float32_layers import loss_of_learner, losses_left
from nbguard.training.profiler.nonfinite.operation_replay import is_finite
from nbguard.training.profiler.nonfinite.operation_search import (
    OperationSearch,
    SkippedSteps,
    UsualGradients,
    as_one_number,
    by_kind,
    has_gradient,
)
from nbguard.training.profiler.nonfinite.origin import (
    keep_first,
    operation_in_graph,
    operation_of_hooks,
    origin_of_backward,
    origin_of_gradient,
    origin_of_loss,
)
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, ModuleCounters, NotPossibleError, autocast_of, device_type
from nbguard.training.profiler.nonfinite.source_lines import StepValues, lines_of
from nbguard.training.profiler.record.fit_bounds import position_of
from nbguard.training.profiler.record.recorder import Recorder, StopFit

# --- A step whose loss or gradients are not finite, while it goes on, with the means to find the operation.


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


# --- The first value that is not finite.


_SHARE = 0.001
"""Most of the time between two checks of all gradients that one check may take, as a share."""
_LAST = 0.5
"""Seconds to wait at the end for values that a device has not come to."""


class FiniteWatch:
    """Looks at the loss of each training batch and, now and then, at the gradients.

    In host memory it looks at once. Values of a device are read some batches late, without waiting for it, and the layer is
    then not looked for any more; with `stop_on_nan` it waits for the loss and the gradients of every batch, keeps the model's
    input until the loss is there, and stops the fit before anything reaches the parameters: a Learner's by CancelFitException,
    any other by StoppedAtNaN.
    """

    watches = "NaN and infinite values"

    def __init__(self, *, stop_on_nan: bool = False) -> None:
        self._stops = stop_on_nan
        self._is_untrained = False  # no backward pass was made of the loss that is looked at
        self._losses = self._gradients = 0
        self._first: NotFinite | None = None
        self._growth: LossGrowth | None = None
        self._jump: LossJump | None = None  # the first loss that is many times those before it
        self._rate: float | None = None  # largest learning rate at the last sampled step
        self._searched: NotFinite | None = None  # by a Learner's learning rate finder, if that was all
        self._learner: weakref.ref[Any] | None = None
        self._is_search = False
        self._counters = ModuleCounters()
        self._usual = UsualGradients()  # that every step looks at
        self._is_scaling = False  # a GradScaler sees to gradients that are not finite
        self._broken_loss: Any = None  # while it is examined
        self._broken: list[Any] = []  # parameters, while their gradients are examined
        self._were_finite: bool | None = None  # after the backward pass; None if unknown
        self._next_check = 0
        self._is_counting = False  # the model has numbers that change from call to call, or may have
        self._device = "cpu"  # the type of the one where the model is
        self._autocast: tuple[str, Any] = "cpu", None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        import torch

        self._torch: Any = torch
        self._since = operations_so_far()
        self._usual.start(torch)
        self._recorder = recorder
        self._arriving = AsyncScalars(torch, waits=self._stops)
        self._late = DeviceLosses(torch, recorder.__len__, self._late_loss_is)
        self._history = LossHistory(torch, self._late.send)
        self._search = OperationSearch(recorder)
        self._skipped = SkippedSteps(self._search)
        recorder.usual_loss = None if self._stops else self._history.is_usual
        recorder.usual_step = None if self._stops else self._usual.is_usual
        recorder.subscribe("batch", self._let_go)  # before anybody reads how much memory is in use
        recorder.subscribe("end", self._let_go)
        recorder.subscribe("learner", self._begin)
        recorder.subscribe("fit ends", self._end)
        recorder.subscribe("model", self._model)
        recorder.subscribe("forward", self._forward, every_batch=self._stops)
        recorder.subscribe("loss", self._loss, every_batch=True)
        recorder.subscribe("step", self._step, every_batch=True)
        recorder.subscribe("gradients", self._has_gradients)
        recorder.subscribe("scale", self._scale)
        if self._stops:
            self._search.record_each()
        else:
            self._search.record_first()

    def ended(self, error: BaseException | None) -> None:
        """Look at a loss that the user's own code left, as a check for NaN does, before its backward pass."""
        for loss in losses_left(self._torch, error, self._since):
            self._look_at_untrained(loss)

    def _look_at_untrained(self, loss: Any) -> None:
        if self._first is None and type(loss) is self._torch.Tensor and not loss.dim():
            stops, self._stops, self._is_untrained = self._stops, False, True  # the fit is over: there is nothing to stop
            is_late = self._arriving.is_late(loss)
            self._broken_loss = None if is_late else loss
            self._arriving.read(loss.detach(), partial(self._untrained_is, len(self._recorder), is_late))
            self._broken_loss, self._stops, self._is_untrained = None, stops, False

    def _untrained_is(self, turned: int, is_late: bool, values: tuple[float, ...]) -> None:
        if not all(map(math.isfinite, values)):
            self._loss_is(turned, is_late, values)

    def stop(self) -> None:
        """Hold nothing of the user's any more. Values that do not arrive in half a second stay unknown."""
        self._search.forget()
        self._late.turn_page()
        end = time.monotonic() + _LAST
        while not self._have_arrived() and time.monotonic() < end:
            time.sleep(0.001)
        self._late.forget()
        self._growth = self._history.growth(self._rate)
        self._recorder.usual_loss = self._recorder.usual_step = self._recorder.usual_gradients = None
        self._recorder.calls.clear()
        self._usual.forget()
        self._counters = ModuleCounters()
        self._learner = None

    def _have_arrived(self) -> bool:
        """Read the values that arrived, in the order of sending; say whether all have."""
        if self._late.poll():
            self._arriving.poll()
            return not self._arriving.is_waiting
        return False

    def observe(self) -> FiniteFacts:
        """Return the number of checks, and the first value that was not finite."""
        losses = self._losses + self._history.count
        course = LossCourse(self._jump, self._growth, self._skipped.origin)
        return FiniteFacts(losses, self._gradients, self._first or self._searched, course)

    def _let_go(self, *_: Any) -> None:
        """Hold no loss of a device in a sampled batch, nor after a loop, where memory in use is the user's."""
        self._late.turn_page()

    def _begin(self, learner: Any) -> None:
        self._learner = weakref.ref(learner)
        callbacks = attribute_of(learner, "cbs")
        self._is_search = callbacks is not None and any(name_of(type(callback)) == "LRFinder" for callback in callbacks)

    def _end(self, _: Any) -> None:
        self._look_at_untrained(None if self._learner is None else loss_of_learner(self._learner()))
        if self._is_search:  # its NaN says nothing of the fits that follow
            self._searched, self._first, self._jump = self._first or self._searched, None, None
            self._history.reset()
            self._late.forget()
            self._arriving = AsyncScalars(self._torch, waits=self._stops)
            self._recorder.subscribe("forward", self._forward, every_batch=self._stops)
        self._learner, self._is_search = None, False

    def _model(self, module: Any, args: Any) -> None:
        self._device = device_type(self._torch, args)
        self._note_autocast()
        self._count_in_every_batch(self._first is None and self._counters.may_change(module))

    def _forward(self, module: Any, args: Any) -> None:
        if self._device == "meta":  # Keras calls a model on tensors without data first, to know its shapes
            self._device = device_type(self._torch, args)
        self._note_autocast()
        if self._is_counting:
            self._count_in_every_batch(self._counters.note(module))
        if self._stops and self._torch.is_grad_enabled():
            self._recorder.calls.keep(args)

    def _note_autocast(self) -> None:
        """Note autocast's effect on the calls of the model from here on, as it is not asked in each batch."""
        self._autocast = autocast_of(self._torch, self._device)

    def _count_in_every_batch(self, is_counting: bool) -> None:
        """Note the model's numbers before each call, or no more."""
        if is_counting != self._is_counting:
            self._is_counting = is_counting
            if not is_counting:
                self._recorder.unsubscribe("forward", self._forward)
            self._recorder.subscribe("forward", self._forward, every_batch=is_counting or self._stops)

    @property
    def _calls(self) -> list[ForwardCall]:
        """Return the calls that led to the latest loss."""
        return [ForwardCall(model, args, self._autocast, names) for model, args, names in self._recorder.calls.latest()]

    def _loss(self, tensors: Any) -> None:
        if self._search.is_on:
            try:
                self._search.loss(tensors, models_of(self._calls), arguments_of(self._calls))
            except Exception:  # noqa: BLE001 - that a value is not finite is worth saying without the operation, too
                self._search.end()
        value = self._history.value_of(tensors)
        if value is not None:  # nearly always: nothing else is made of it
            self._losses += 1
            if self._history.note(value, self._calls) and self._jump is None:
                self._note_jump(value, len(self._recorder), self._calls)
        else:
            self._late.turn_page()
            self._have_arrived()
            for tensor in tensors if type(tensors) in (tuple, list) else (tensors,):
                if self._first is None and issubclass(type(tensor), self._torch.Tensor):
                    self._look_at_loss(tensor)
        if self._stops:
            self._recorder.calls.release()

    def _look_at_loss(self, tensor: Any) -> None:
        torch = self._torch
        with torch._C.DisableTorchFunction():
            number = as_one_number(torch, tensor)
            if number is None:
                return
            is_late = self._arriving.is_late(number)
        self._broken_loss = None if is_late else tensor
        try:
            self._arriving.read(number, partial(self._loss_is, len(self._recorder), is_late))
        finally:
            self._broken_loss = None

    def _note_jump(self, value: float, turned: int, calls: list[ForwardCall]) -> None:
        self._jump = LossJump(
            place=position_of(self._recorder.boundaries(turned), self._recorder.ahead),
            loss=value,
            usual=self._history.usual,
            peak=peak_of(self._torch, calls),
            usual_peak=self._history.usual_peak,
        )

    def _late_loss_is(self, turned: int, value: float) -> None:
        self._loss_is(turned, True, (value,))

    def _loss_is(self, turned: int, is_late: bool, values: tuple[float, ...]) -> None:
        self._losses += 1
        if self._first is not None:
            return
        if all(map(math.isfinite, values)):
            if is_late and len(values) == 1 and self._history.note(values[0], ()) and self._jump is None:
                self._note_jump(values[0], turned, [])
            return
        if is_late:
            origin = Origin(
                kind="unknown", note="that batch was gone, because a device's values are read late to avoid waiting for it"
            )
        else:
            origin = self._origin()
        self._note_first("loss", values, turned, origin, is_late)

    def _origin(self) -> Origin:
        try:
            return origin_of_loss(self._torch, self._calls, self._counters, is_first=self._history.first is None)
        except Exception as error:  # noqa: BLE001 - that the loss is not finite is worth saying without the layer, too
            return Origin(kind="unknown", note=f"looking for it failed ({name_of(type(error))}: {error})")

    def _step(self, optimizer: Any) -> None:
        self._search.steps()
        if self._first is not None:
            return
        self._have_arrived()
        start = self._recorder.clock()
        is_usual = self._usual.is_usual(optimizer)
        if (start < self._next_check and is_usual and not self._stops) or self._is_scaled(optimizer):
            return
        groups = groups_of(optimizer)
        rates = [float(rate) for group in groups if type(rate := group.settings.get("lr")) in (int, float) and rate is not None]
        self._rate = max(rates, default=None)
        parameters = [p for group in groups for p in group.parameters if has_gradient(self._torch, p)]
        self._usual.note(optimizer, parameters)
        self._were_finite = True if self._recorder.usual_gradients else None if self._search.changes_gradients else False
        for alike in by_kind(parameters):
            self._look_at_gradients(alike)
        self._gradients += 1
        if self._search.changes_gradients and not self._is_scaling and self._first is None:
            self._recorder.usual_gradients = self._usual.are_usual
        now = self._recorder.clock()
        self._next_check = now + int((now - start) / _SHARE)

    def _has_gradients(self) -> None:
        """Look at all gradients of a backward pass that left unusual ones, before anything changes them or adds to them."""
        if self._first is None:
            self._were_finite = False
            for alike in by_kind(list(self._usual.parameters())):
                self._look_at_gradients(alike)

    def _scale(self, _scaler: Any, _is_given: bool, found: list[Any]) -> None:
        self._is_scaling, self._recorder.usual_gradients = True, None
        if found and self._first is None:
            flags = self._torch.stack([flag.detach().reshape(()) for flag in found])
            self._arriving.read(flags, partial(self._skipped.note, models_of(self._calls)))

    def _is_scaled(self, optimizer: Any) -> bool:
        """Say whether a GradScaler sees to gradients that are not finite: that is how it finds its scale."""
        if attribute_of(optimizer, "found_inf") is not None:
            return True
        learner = None if self._learner is None else self._learner()
        scaler = attribute_of(learner, "scaler")
        return scaler is not None and attribute_of(scaler, "_enabled") is True

    def _look_at_gradients(self, parameters: list[Any]) -> None:
        torch = self._torch
        with torch.no_grad(), torch._C.DisableTorchFunction():
            norms = torch.stack(torch._foreach_norm([p.grad for p in parameters], math.inf))
            held, is_late = [weakref.ref(p) for p in parameters], self._arriving.is_late(norms)
        self._arriving.read(norms, partial(self._gradients_are, len(self._recorder), is_late, held))

    def _gradients_are(self, turned: int, is_late: bool, held: list[weakref.ref[Any]], values: tuple[float, ...]) -> None:
        if self._first is not None or all(map(math.isfinite, values)):
            return
        pairs = zip(held, values, strict=True)
        self._broken = [p for ref, value in pairs if not math.isfinite(value) and (p := ref()) is not None]
        origin = origin_of_gradient(self._counters.models(), set(map(id, self._broken)))
        try:
            self._note_first("gradient", values, turned, origin, is_late)
        finally:
            self._broken = []

    def _note_first(self, of: Any, values: tuple[float, ...], turned: int, origin: Origin, is_late: bool) -> None:
        stops = self._stops and not is_late and not self._is_search
        value: Any = "NaN" if any(map(math.isnan, values)) else "infinite"
        self._first = NotFinite(
            of=of,
            value=value,
            place=position_of(self._recorder.boundaries(turned), self._recorder.ahead, has_loss=self._is_untrained),
            origin=origin,
            has_stopped=stops,
            is_compiled=has_compiled(),
            is_search=self._is_search,
            first_loss=self._history.first,
            last_loss=self._history.last,
            largest=None if is_late else largest_parameter(self._torch, models_of(self._calls)),
            rate=self._rate,
            peak=None if is_late else peak_of(self._torch, self._calls),
            usual_peak=self._history.usual_peak,
        )
        self._recorder.usual_step = self._recorder.usual_gradients = None
        self._recorder.unsubscribe("step", self._step)
        if not self._is_search:
            self._look_for_operation(origin, stops=stops, is_late=is_late)
        found_in = (model for model in models_of(self._calls) if name_of(type(model)) == origin.root)
        keep_first(self._first, next(found_in, None))
        self._recorder.unsubscribe("forward", self._forward)
        self._is_counting = False
        if stops:
            raise StopFit(stopped_by(self._first, is_of_learner=self._learner is not None))

    def _look_for_operation(self, origin: Origin, *, stops: bool, is_late: bool) -> None:
        """Find the operation where only the kind of code is known."""
        if origin.operation is not None:
            self._search.end()
            return
        try:
            if is_late:
                self._search.follow(StepValues.none(), self._operation_is)
                return
            FailedStep(
                origin=origin,
                calls=self._calls,
                counters=self._counters,
                is_last=stops,
                loss=self._broken_loss,
                broken=self._broken,
                were_finite=self._were_finite,
            ).look_for_operation(self._torch, self._search, self._operation_is)
        except Exception:  # noqa: BLE001 - that a value is not finite is worth saying without the operation, too
            self._search.end()

    def _operation_is(self, origin: Origin) -> None:
        if self._first is not None:
            before = self._first.origin
            if before.kind == origin.kind == "gradient":
                origin = replace(before, operation=origin.operation)  # with the parameter
            if before.kind != "input" or origin.operation is not None:
                self._first = replace(self._first, origin=replace(origin, trial=origin.trial or before.trial))
