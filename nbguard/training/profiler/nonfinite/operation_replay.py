"""The recorded operations of a step, computed once more on copies, and the first one that makes a value that is not finite."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.training.profiler.checks.amp import autocast_dtypes
from nbguard.training.profiler.nonfinite.operation_trace import (
    OperationCall,
    StepProgram,
    TensorSlot,
    UserLines,
    is_left_out,
    is_own_function,
)
from nbguard.training.profiler.nonfinite.rerun import NotPossibleError

_SECONDS = 1.0
"""Longest that steps are computed again for one value, all tries together."""
_SOFTMAXES = frozenset(("softmax", "log_softmax", "softmin", "logsumexp", "scaled_dot_product_attention", "cross_entropy"))
"""Operations that take minus infinity in their stride, unless a row has nothing else."""
_tree: Any = torch.utils._pytree


class Allowance:
    """The time that is left to compute steps again."""

    def __init__(self) -> None:
        self._left = _SECONDS

    @property
    def is_used_up(self) -> bool:
        """Say whether no time is left."""
        return self._left <= 0

    @contextlib.contextmanager
    def used(self) -> Iterator[float]:
        """Take the time of the code inside, which gets the moment of its end."""
        start = time.monotonic()
        try:
            yield start + self._left
        finally:
            self._left -= time.monotonic() - start


@dataclass(slots=True, kw_only=True)
class FoundOperation:
    """The operation that made the first value which is not finite, or the tensor that came with it."""

    call: OperationCall | None = None  # None if `slot` came so from elsewhere
    slot: int = 0
    values: Any = None  # the arguments of the call, or that tensor
    made: Any = None  # tensors: its results, or in a backward pass the gradients of its inputs
    gradient: Any = None  # of a backward pass: that of its results; None if it was called itself
    of_gradient: bool = False  # it was called for a gradient: in a Function's `backward`, or between backward pass and step


@dataclass(slots=True, kw_only=True)
class _Step:
    """A call as it was computed again."""

    call: OperationCall
    arguments: Any
    broken: list[int] = field(default_factory=list)  # slots that were not finite when they were read
    made: list[Any] = field(default_factory=list)
    is_finite: bool = True


class _BackwardPass:
    """The gradients of a backward pass up to the first that is not finite.

    Hooks lead to it, and it to no tensor of the graph: a graph that its own hooks keep is never freed.
    """

    def __init__(self) -> None:
        self.ends = 0.0
        self.gradients: dict[int, Any] = {}  # by slots
        self.broken: int | None = None  # the slot of the one that is not finite

    def look(self, slot: int, gradient: Any) -> None:
        """Note a gradient."""
        if time.monotonic() > self.ends:
            raise NotPossibleError("to compute the step again took too long")
        if self.broken is None:
            self.gradients[slot] = gradient.detach()
            self.broken = None if is_finite(gradient) else slot


class _FirstBroken(TorchFunctionMode):  # type: ignore[misc]
    """Finds the first function of torch's whose result is not finite, of finite operands, in Python code that runs inside."""

    def __init__(self) -> None:
        self.found: FoundOperation | None = None
        self._lines = UserLines()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.found is None and not is_left_out(function):
            made = _tensors(result)
            if not all(map(is_finite, made)) and all(map(is_finite, _tensors((args, kwargs)))):
                line = self._lines.at(sys._getframe(1))
                call = OperationCall(
                    function=function, arguments=None, result=None, reads=(), makes=(), line=line, has_grad=False, autocast={}
                )
                self.found = FoundOperation(call=call, values=(args, kwargs), made=made, of_gradient=True)
        return result


class StepReplay:
    """Computes a program again, without a change to any tensor that it was recorded with."""

    def __init__(
        self,
        program: StepProgram,
        values: dict[int, Any],
        models: Iterable[Any] = (),
        until: int | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """`values`: tensors by the slots that they take the place of, results' too.

        `models`: whose statistics the step that failed has broken already, and may not have used. `until`: operations up to the
        loss, if the program has others after it. `allowance`: of time, which other tries take from, too.
        """
        self._until = len(program.calls) if until is None else until
        buffers = {id(buffer) for model in models for buffer in model.buffers()}
        self._statistics = {slot for slot in program.outside if id(program.tensor(slot)) in buffers}
        self._program = program
        self._values = values
        self._slots: dict[int, Any] = {}
        self._given: set[int] = set()  # results that are not finite in the step that failed, of operands that are not known
        self._steps: list[_Step] = []
        self._allowance = allowance or Allowance()
        self._backwards = _BackwardPass()

    def find(
        self, results: tuple[int, ...], gradients: Mapping[int, tuple[int, int]] | None = None, *, is_loss: bool = True
    ) -> FoundOperation | None:
        """Return the origin of non-finite values in these slots, or in the first one's gradients, or None.

        `gradients`: slots of gradients after the backward pass and before the step, by those of the parameters. `is_loss`: the
        first result is the loss; else the gradient of each is taken to be 1.

        Raises:
            NotPossibleError: it took too long, or failed.
        """
        try:
            with self._allowance.used() as ends, kept_generators(), torch.enable_grad(), warnings.catch_warnings():
                self._backwards.ends = ends
                warnings.simplefilter("ignore")  # they were given once
                self._compute(self._program.calls[: self._until])
                if any(slot not in self._slots for slot in results):
                    raise NotPossibleError("a tensor of the step is gone")
                broken = [slot for slot in results if slot in self._slots and not is_finite(self._slots[slot])]
                if broken:
                    return self._origin(broken)
                found = self._backward(results[:1] if is_loss else results)
                return found or (self._after(gradients) if gradients and self._backwards.broken is None else None)
        except NotPossibleError:
            raise
        except Exception as error:
            raise NotPossibleError(f"to compute the step again failed ({name_of(type(error))})") from error

    def _compute(self, calls: Iterable[OperationCall]) -> None:
        for call in calls:
            if time.monotonic() > self._backwards.ends:
                raise NotPossibleError("to compute the step again took too long")
            try:
                step = _Step(call=call, arguments=_filled(call.arguments, self._read))
            except NotPossibleError:  # its result stays unknown, unless that is given
                for slot in call.makes:
                    if (given := self._values.get(slot)) is not None:
                        self._hold(slot, given.detach().clone())
                continue
            step.broken = [slot for slot in dict.fromkeys(call.reads) if not is_finite(self._slots[slot])]
            args, named = step.arguments
            with torch.set_grad_enabled(call.has_grad), _autocast(call.autocast):
                result = call.function(*args, **named)
            self._keep(
                call.result if call.result is not None else TensorSlot(call.makes[0]),
                args[0] if call.result is None else result,
            )
            step.made = [self._slots[slot] for slot in call.makes if slot in self._slots]
            step.is_finite = all(map(is_finite, step.made))
            self._steps.append(step)

    def _read(self, slot: TensorSlot) -> Any:
        number = slot.number
        if number not in self._slots:
            given = self._values.get(number)
            tensor = self._outside(number) if given is None else given
            if tensor is None:
                raise NotPossibleError("a tensor of the step is gone")
            copy = tensor.detach().clone()
            like = self._outside(number)
            self._hold(number, copy.requires_grad_((tensor if like is None else like).requires_grad))
        return self._slots[number]

    def _outside(self, number: int) -> Any:
        return self._program.tensor(number) if number in self._program.outside else None

    def _hold(self, slot: int, tensor: Any) -> None:
        self._slots[slot] = tensor
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backwards.look, slot))

    def _keep(self, pattern: Any, result: Any) -> None:
        """Note the tensors of a result by their slots."""
        slots = [leaf for leaf in _tree.tree_leaves(pattern) if type(leaf) is TensorSlot]
        for slot, tensor in zip(slots, _tensors(result), strict=True):
            given = self._values.get(slot.number)
            if given is not None and not tensor.requires_grad and given.shape == tensor.shape:
                if is_finite(tensor) and not is_finite(given):
                    self._given.add(slot.number)
                tensor = given.detach().clone()
            self._hold(slot.number, tensor)

    def _origin(self, broken: list[int]) -> FoundOperation:
        """Go back from values that are not finite to the first operation whose inputs were."""
        makers = {slot: step for step in self._steps for slot in step.call.makes}
        order = {id(step): number for number, step in enumerate(self._steps)}
        found: list[tuple[bool, int, FoundOperation]] = []
        seen: set[int] = set()
        waiting = list(broken)
        while waiting:
            slot = waiting.pop()
            if slot in seen:
                continue
            seen.add(slot)
            maker = None if slot in self._given else makers.get(slot)
            if maker is None:
                is_late = slot in self._statistics or _is_mask(None, [self._slots[slot]])
                found.append((is_late, -1, FoundOperation(slot=slot, values=self._slots[slot])))
            elif maker.is_finite:  # written to since, through another tensor of the same memory
                later = [step for step in self._steps[order[id(maker)] + 1 :] if not step.is_finite]
                waiting.extend(later[0].call.makes if later else ())
            elif not maker.broken or self._is_softmax_of_nothing(maker, makers):
                is_late = _is_mask(maker.call, maker.made)
                found.append(
                    (
                        is_late,
                        order[id(maker)],
                        FoundOperation(call=maker.call, slot=slot, values=maker.arguments, made=maker.made),
                    )
                )
            else:
                waiting.extend(maker.broken)
        if not found:
            raise NotPossibleError("where it came from was not found in the step")
        return min(found, key=lambda each: each[:2])[2]

    def _is_softmax_of_nothing(self, step: _Step, makers: Mapping[int, _Step]) -> bool:
        """Say whether a softmax got rows of nothing but minus infinity, which a mask has put in."""
        if step.call.name not in _SOFTMAXES:
            return False
        seen: set[int] = set()
        waiting = list(step.broken)
        while waiting:
            slot = waiting.pop()
            tensor, maker = self._slots[slot], None if slot in self._given else makers.get(slot)
            if bool((tensor.isnan() | (tensor == torch.inf)).any()):
                return False
            if maker is not None and not maker.broken and not _is_mask(maker.call, maker.made):
                return False
            if maker is not None and slot not in seen:
                waiting.extend(maker.broken)
            seen.add(slot)
        return True

    def _backward(self, slots: tuple[int, ...]) -> FoundOperation | None:
        """Return the operation that makes a gradient which is not finite of finite ones."""
        results = tuple(self._slots[slot] for slot in slots if self._slots[slot].requires_grad)
        leaves = [tensor for tensor in self._slots.values() if tensor.requires_grad and tensor.is_leaf]
        if not leaves or not results:
            return None
        engine: Any = torch.autograd.Variable._execution_engine  # `grad` would be handled by the mode, and have none inside
        with _FirstBroken() as inside:
            engine.run_backward(results, tuple(map(torch.ones_like, results)), False, False, tuple(leaves), True, False)
        slot, known = self._backwards.broken, self._backwards.gradients
        if slot is None:
            return None
        readers = [step for step in self._steps if slot in step.call.reads and not known.keys().isdisjoint(step.call.makes)]
        for step in reversed(readers):
            before = [known.get(made) for made in step.call.makes]
            if len(readers) == 1 or self._makes_it(step, slot, before):
                if inside.found is not None and is_own_function(getattr(step.call.function, "__self__", None)):
                    found: FoundOperation = inside.found
                    return found
                return FoundOperation(call=step.call, slot=slot, values=step.arguments, made=[known[slot]], gradient=before)
        return None

    def _after(self, gradients: Mapping[int, tuple[int, int]]) -> FoundOperation | None:
        """Return the operation that makes one of the gradients not finite between the backward pass and the step."""
        for slot, (before, _) in gradients.items():
            gradient = self._backwards.gradients.get(slot)
            if gradient is not None:
                self._slots[before] = gradient.clone()
        self._steps.clear()
        self._compute(self._program.calls[self._until :])
        broken = [slot for _, slot in gradients.values() if slot in self._slots and not is_finite(self._slots[slot])]
        if not broken:
            return None
        found = self._origin(broken)
        if found.call is None:  # written in place, several at once
            step = next((step for step in self._steps if not step.is_finite and not step.broken), None)
            found = found if step is None else FoundOperation(call=step.call, values=step.arguments, made=step.made)
        return None if found.call is None else replace(found, of_gradient=True)

    def _makes_it(self, step: _Step, slot: int, before: list[Any]) -> bool:
        """Say whether this operation alone makes a gradient that is not finite."""
        copies: dict[int, Any] = {}

        def copied(tensor: Any) -> Any:
            return copies.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.is_floating_point()))

        args, named = _tree.tree_map_only(torch.Tensor, copied, step.arguments)
        with _autocast(step.call.autocast):
            result = step.call.function(*args, **named)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(_tensors(result), before, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        source = copies.get(id(self._slots[slot]))
        if not pairs or source is None:
            return False
        (gradient,) = torch.autograd.grad([pair[0] for pair in pairs], [source], [pair[1] for pair in pairs], allow_unused=True)
        return gradient is not None and not is_finite(gradient)


def is_finite(tensor: Any) -> bool:
    """Say whether all values are finite; True if it has no floating point values. Waits for the tensor's device."""
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all().tolist())


def _is_mask(call: OperationCall | None, made: list[Any]) -> bool:
    """Say whether values are those of a mask, which a softmax takes in its stride: minus infinity, put in on purpose."""
    is_put_in = call is None or call.name in ("masked_fill", "where", "full", "full_like", "fill", "tensor", "triu", "setitem")
    return is_put_in and all(not bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in made)


def _tensors(values: Any) -> list[Any]:
    return [leaf for leaf in _tree.tree_leaves(values) if torch.Tensor in mro_of(type(leaf))]


def _filled(template: Any, read: Callable[[TensorSlot], Any]) -> Any:
    return _tree.tree_map_only(TensorSlot, read, template)


@contextlib.contextmanager
def _autocast(wanted: dict[str, Any]) -> Iterator[None]:
    """Have autocast as it was at a call."""
    now = autocast_dtypes(torch)
    with contextlib.ExitStack() as stack:
        for device in {*now, *wanted}:
            if now.get(device) != wanted.get(device):
                on = device in wanted
                stack.enter_context(torch.autocast(device, wanted.get(device), enabled=on, cache_enabled=False))
        yield
