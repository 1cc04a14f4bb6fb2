"""The search for the operation that made a value that is not finite, in the step after the one that failed.

A step is over when its loss is known, and code of the user's is not run twice. So the operations of the next one are recorded
while it runs, and computed again with the values of the one that failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.nonfinite import Origin
from nbguard.training.profiler.checks.optimizer_facts import groups_of
from nbguard.training.profiler.nonfinite.operation_replay import Allowance, StepReplay
from nbguard.training.profiler.nonfinite.operation_trace import StepTrace
from nbguard.training.profiler.nonfinite.origin import gradient_hooks_of, items_of, only_change, only_operation, origin_of
from nbguard.training.profiler.nonfinite.rerun import NotPossibleError
from nbguard.training.profiler.nonfinite.source_lines import RecordedStep, StepValues, named_tensors
from nbguard.training.profiler.record.recorder import Event, Recorder

_TRIES = 8
"""Losses after the one that failed whose steps are recorded: it may be of another kind, or its batch of another size."""


_OUTSIDE: tuple[Event, ...] = ("step", "zero_grad", "scale", "waited", "forward", "fit ends")
"""Events outside of functions of torch's."""


class OperationSearch:
    """Records the operations of a step from its batch to its loss, and looks in it for the one that failed.

    Nothing is recorded where a model is compiled, or where the user has a function mode of torch's on.
    """

    watches = "the operation that made a value which is not finite"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._trace: StepTrace | None = None
        self._values: StepValues | None = None  # of the step that failed
        self._found: Callable[[Origin], None] | None = None
        self._step: RecordedStep | None = None  # recorded last, for the case that a later one fails
        self._is_kept_on = False  # each step is recorded
        self._is_first = False  # only the first one is
        self._passes = 0  # backward passes since a step
        self.changes_gradients: bool = (
            False  # the step that was recorded, before the optimizer took them; or it added several up
        )
        self._left: StepTrace | None = None  # that could not be ended yet
        self._parameters: dict[int, weakref.ref[Any]] = {}  # by slots, of the step that is recorded, once its loss is known
        self._is_over = False  # the loader had no batch left
        self._tries = 0
        self.is_on: bool = False
        self.allowance: Allowance = Allowance()

    @property
    def records_each(self) -> bool:
        """Say whether each step is recorded."""
        return self.is_on and self._is_kept_on

    def record_each(self) -> None:
        """Record each step, to find the operation in the very step that fails."""
        self._is_kept_on = True
        self._switch_on()
        self._recorder.subscribe("backward", self._backward, every_batch=True)

    def record_first(self) -> None:
        """Record the first step, to find the operation of a later one like it; hold nothing of it but small constants."""
        self._is_kept_on = self._is_first = True
        self._tries = _TRIES
        self._switch_on(every_batch=False)
        self._recorder.subscribe("backward", self._backward)

    def follow(self, values: StepValues, found: Callable[[Origin], None]) -> None:
        """Record the steps that follow, and tell of the operation that makes these values non-finite."""
        self.end()
        self._is_kept_on = self._is_first = False
        self._values, self._found, self._tries = values, found, _TRIES
        self._switch_on()

    def end(self) -> None:
        """Record no more, and hold nothing."""
        self._end_trace()
        if self.is_on:
            self.is_on = False
            for event, act in (("waited", self._batch), ("forward", self._begin), ("end", self._pause)):
                self._recorder.unsubscribe(event, act)  # type: ignore[arg-type]
            self._recorder.unsubscribe("backward", self._backward)
        self._values = self._found = None

    def forget(self) -> None:
        """Hold no recorded step either."""
        self.end()
        self._end_left()
        self._step = None

    def _switch_on(self, *, every_batch: bool = True) -> None:
        self.is_on = True
        self._recorder.subscribe("waited", self._batch, every_batch=every_batch)
        self._recorder.subscribe("forward", self._begin, every_batch=every_batch)
        self._recorder.subscribe("end", self._pause)

    def _pause(self) -> None:
        self._end_trace()
        if self._step is not None:
            self._step.program.let_go()
        self._is_over = True

    def _batch(self) -> None:
        self._end_trace()
        if not self._is_over:
            self._begin()
        self._is_over = False

    def _begin(self, *_: Any) -> None:
        self._end_left()
        if self._step is not None:
            self._step.program.let_go()
        if self._is_first and self._passes:  # no step was taken since: gradients add up, or nobody steps
            self.changes_gradients = True
            self._leave_first()
            return
        if self._parameters:  # of a step that was not taken
            self._end_trace()
        if self._trace is None and torch.is_grad_enabled() and not has_compiled():
            trace = StepTrace()
            if trace.begin():
                self._trace = trace

    def _end_trace(self) -> StepTrace | None:
        trace, self._trace = self._trace, None
        self._parameters = {}
        if trace is not None and not trace.end():
            self._left = trace
            for event in _OUTSIDE:
                self._recorder.subscribe(event, self._end_left, every_batch=True)
        return trace

    def _end_left(self, *_: Any) -> None:
        if self._left is not None and self._left.end():
            self._left = None
            for event in _OUTSIDE:
                self._recorder.unsubscribe(event, self._end_left)

    def loss(self, losses: Any, models: list[Any], arguments: list[Any]) -> None:
        """Look at the step that has led to a loss, with its models and the arguments that these were called with."""
        values = self._values
        trace = self._trace if values is None else self._end_trace()
        loss = next(iter(losses), None) if type(losses) in (tuple, list) else losses
        step = None
        if trace is not None and torch.Tensor in mro_of(type(loss)):
            step = RecordedStep.of(trace, loss, named_tensors(arguments))
        if values is None:  # each step is recorded
            self._tries -= 1
            if step is None:
                self._end_trace()
            elif trace is not None:
                weights = (weight for model in models for weight in model.parameters())
                self._parameters = {slot: weakref.ref(w) for w in weights if (slot := trace.slot_of(w)) is not None}
                self._step = step
            if self._is_first and not self._tries:
                self._leave_first()
            return
        self._tries -= 1
        origin, _ = (None, False) if step is None else _origin(step, values, models, self.allowance)
        found = self._found
        if origin is not None or not self._tries or self.allowance.is_used_up:
            self.end()
        if origin is not None and found is not None:
            found(origin)

    def _backward(self) -> None:
        """Record on from the gradients."""
        self._passes += 1
        if self._trace is None or self._step is None or not self._parameters:
            return
        del self._step.program.calls[self._step.until :]  # of the backward pass itself
        for slot, reference in self._parameters.items():
            gradient = getattr(reference(), "grad", None)
            if gradient is not None and gradient.layout is torch.strided:
                number = self._trace.slot_from_here(gradient)
                self._step.gradients[slot] = number, number

    def steps(self) -> None:
        """Record no further than to the step, which follows."""
        passes, self._passes = self._passes, 0
        if not self._parameters:
            return
        parameters, step = self._parameters, self._step
        trace = self._end_trace()
        if trace is not None and step is not None:
            for slot, (before, _) in step.gradients.items():
                gradient = getattr(parameters[slot](), "grad", None)
                last = None if gradient is None else trace.slot_of(gradient)
                step.gradients[slot] = before, last or before
            is_changed = any(before != last for before, last in step.gradients.values())
            self.changes_gradients = is_changed or passes > 1
            if len(step.program.calls) > step.until:
                step.note(trace, named_tensors(()))
            if self._is_first:
                self._leave_first()

    def _leave_first(self) -> None:
        if self._step is not None:
            self._step.program.let_go()
        self.end()

    def lines_of(self, name: str) -> set[str]:
        """Return the lines of an operation in the step that was recorded."""
        return set() if self._step is None else {call.line.words for call in self._step.program.calls if call.name == name}

    def now(
        self, values: StepValues, models: list[Any], broken: Iterable[Any] = (), *, were_finite: bool | None = None
    ) -> Origin | None:
        """Return the origin in this very step, if it has the operations of the recorded one, or None if unknown.

        `broken`: parameters whose gradients are not finite. `were_finite`: they were, after the backward pass, or None if
        unknown. The operation is then known by elimination, where only one can have made them so.
        """
        if self._step is None:
            return None
        origin, is_finite = _origin(self._step, values, models, self.allowance)
        if origin is not None or not is_finite or not broken:
            return origin
        hooks, found = [hook for parameter in broken for hook in gradient_hooks_of(parameter)], None
        if were_finite and not hooks:
            found = only_change(self._step)
        elif were_finite is False:
            found = only_operation([*self._step.hooks, *hooks])
        return None if found is None else Origin(kind="gradient", type="parameter", operation=found)


def _origin(step: RecordedStep, values: StepValues, models: list[Any], allowance: Allowance) -> tuple[Origin | None, bool]:
    """Return the origin by the values of the step that failed, and whether these were all finite."""
    slots = None if allowance.is_used_up else values.by_slot(step)
    if slots is None:
        return None, False
    try:
        found = StepReplay(step.program, slots, models, step.until, allowance).find((step.loss,), step.gradients)
    except NotPossibleError:  # the next step may be like the one that failed
        return None, False
    if found is None:
        return None, True
    if found.call is not None:
        return origin_of(found, models), False
    name, is_input = values.name_of(step, found.slot)
    if found.values.requires_grad or not (name or is_input):
        return None, False
    root = name_of(type(models[-1])) if models else ""
    return Origin(kind="input" if is_input else "target", name=name, root=root, items=items_of(found.values)), False


# --- A small gradient of each optimizer that tells whether a step is skipped, and skips in a row


_PERSISTS = (3, 12)
"""Steps skipped in a row until the operation is looked for: by the second time a scale fell far enough."""


class SkippedSteps:
    """Counts the steps that are skipped in a row, and looks for the operation once that is no search for the scale's level.

    `origin`: of their gradients, or None without one or if unknown.
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


def as_one_number(torch: Any, tensor: Any) -> Any | None:
    """Return a loss, or the largest value of several, as a tensor of one value; None if it has no floating point values."""
    count = tensor.numel()
    if not count or not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    values = tensor.detach()
    if count > 1:
        return values.abs().amax()
    return values.reshape(()) if values.dim() > 1 else values


def has_gradient(torch: Any, parameter: Any) -> bool:
    """Say whether a parameter has a gradient with values in memory of its own."""
    gradient = parameter.grad
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.numel() > 0


def by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Return parameters in lists whose gradients are of one device and type."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        kinds.setdefault((gradient.device, gradient.dtype), []).append(parameter)
    return list(kinds.values())


_SMALL = 2**14
"""Values of a gradient that every step looks at."""


class UsualGradients:
    """Looks at the gradient of one small parameter of each optimizer, the first: the backward pass comes to it late."""

    def __init__(self) -> None:
        self._checked: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}  # optimizer and parameter, by id

    def start(self, torch: Any) -> None:
        """Look nothing up any more, as every step asks."""
        base = torch._C.TensorBase
        self._torch, self._tensor, self._sum, self._item = torch, torch.Tensor, base.sum, base.item

    def note(self, optimizer: Any, parameters: list[Any]) -> None:
        """Choose among the parameters of an optimizer that have a gradient."""
        small = next((p for p in parameters if p.grad.is_cpu and p.grad.numel() <= _SMALL), None)
        if small is not None:
            self._checked[id(optimizer)] = weakref.ref(optimizer), weakref.ref(small)

    def is_usual(self, optimizer: Any) -> bool:
        """Say whether the gradient that was chosen is finite, or is none in host memory."""
        return self._is_usual(self._checked.get(id(optimizer)))

    def _is_usual(self, checked: tuple[weakref.ref[Any], weakref.ref[Any]] | None) -> bool:
        parameter = None if checked is None else checked[1]()
        gradient: Any = None if parameter is None else parameter.grad
        if type(gradient) is not self._tensor or not gradient.is_cpu:
            return True
        value = self._item(self._sum(gradient))
        return bool(value - value == 0)

    def are_usual(self) -> bool:
        """Say so of all optimizers."""
        return all(map(self._is_usual, self._checked.values()))

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all optimizers that have a gradient."""
        for reference, _ in self._checked.values():
            for group in () if (optimizer := reference()) is None else groups_of(optimizer):
                yield from (p for p in group.parameters if has_gradient(self._torch, p))

    def forget(self) -> None:
        """Hold nothing any more."""
        self._checked.clear()
