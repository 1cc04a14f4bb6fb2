"""Watches the passes of a training, and runs one that ran out of memory again in pieces.

Where nothing runs out, a call costs a copy of the generators' states, and a backward pass reads all addresses of gradients.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

from nbguard.memory.scan.oom.chain import read
from nbguard.training.survive.changes import ChangeLog, SurvivalChange
from nbguard.training.survive.pieces import (
    DividableCall,
    GuardedForward,
    UndividableError,
    batch_norms,
    divided,
    frozen_statistics,
    obstacle,
    tensors_of,
    try_small,
)
from nbguard.training.survive.ranks import collectives_so_far, is_alone, no_collectives
from nbguard.training.survive.state import (
    StateBefore,
    add_gradients,
    autocast_now,
    captures,
    cleared,
    drop_saved,
    let_go,
    reached_outputs,
    room_for,
    room_needed,
    set_autocast,
)

_LEAST_WITH_NORM = 2
"""Items of a piece that a batch norm needs."""
_VERSION = attrgetter("_version")
_APART = 10
"""Batches after a move before tensors move again; one that does not last as long is not worth its time."""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception is PyTorch's own of memory that ran out, also one that a library has reworded."""
    text = read(error)
    return text is not None and (
        text.kind in ("device", "library") or (text.kind == "host" and isinstance(error, RuntimeError))
    )


class _Call:
    """The last call of a model in a step, from its arguments to its outputs' gradients."""

    def __init__(self, forward: GuardedForward, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateBefore) -> None:
        self.forward, self.args, self.kwargs, self.state = forward, args, kwargs, state
        self.outputs: list[tuple[int, int]] = []  # (sequence number, output number) of each output's node
        self.gradients: dict[int, Any] = {}  # of outputs, by their place among those

    def watch(self, output: Any) -> None:
        """Keep the gradients of the outputs once they are known."""
        for place, tensor in enumerate(_computed(output)):
            node, number = tensor.grad_fn, tensor.output_nr
            self.outputs.append((node._sequence_nr(), number))
            node.register_prehook(partial(_note, ref(self), place, number))  # after the hooks of the tensor itself


def _note(call: ref[_Call], place: int, number: int, gradients: tuple[Any, ...]) -> None:
    """Keep the gradient of an output for a call that may be run again. The graph, which has this hook, keeps no call."""
    if (alive := call()) is not None and gradients[number] is not None:
        alive.gradients[place] = gradients[number]


def _computed(output: Any) -> list[Any]:
    """Return the tensors in an output that a backward pass leads through."""
    return [tensor for tensor in tensors_of(output) if tensor.grad_fn is not None]


class Guard:
    """Guards the calls of modules, the backward passes and the steps of one training, on the thread that starts it.

    Args:
        modules: those whose calls are divided.
        piecewise_batch_norm: batch norms may take the statistics of a piece.
        items: divide from the first call on, into pieces of this many items, and not only once memory ran out.
        redoes: also redo a backward pass on its own, for loops without a known step; keeps the outputs' gradients meanwhile.
        say: called with each sentence.

    Attributes:
        log: of the changes and refusals.
        parameters: all tensors whose gradients a backward pass may change.
        scalers: gradient scalers, as far as they are known.
        is_zeroed: all gradients are zeros, where there are any, so that there is no need to keep them.
        sizes: items of a piece, with gradients and without; None for whole batches.
        passes: backward passes that are complete.
    """

    def __init__(
        self,
        modules: list[Any],
        *,
        say: Callable[[str], None],
        piecewise_batch_norm: bool = False,
        items: int | None = None,
        redoes: bool = False,
    ) -> None:
        self.log = ChangeLog(lambda: f"batch {self.passes + 1}", say)
        self.parameters: list[Any] = []
        self.scalers: list[Any] = []
        self.is_zeroed = False
        self.modules = modules
        self._norms_allowed, self._redoes = piecewise_batch_norm, redoes
        self.sizes: dict[bool, int | None] = {True: items, False: items}
        self.passes = 0
        self._forwards = [GuardedForward(self.call, module) for module in modules]
        self._thread = threading.get_ident()
        self._was_alone = True
        self._is_inside = self._is_in_backward = self._is_in_step = False
        self._last: _Call | None = None
        self._given_up = False  # the error that is on its way was refused already
        self._passes_back = False  # a backward pass has begun since the model's call
        self._calls = 0
        self._moved: dict[bool, tuple[int, int]] = {}  # the last batch that tensors moved for, and its room's bytes
        self._original: Any = None

    def start(self) -> None:
        """Put the guard around the modules and around `torch.autograd.backward`."""
        autograd: Any = sys.modules["torch"].autograd
        self._thread = threading.get_ident()
        self._was_alone = is_alone()  # asked once, as each time takes 2,000 instructions
        for forward in self._forwards:
            forward.put()
        if getattr(autograd.backward, "__self__", None) is not self:  # an interrupt had kept it from being taken out
            self._original = autograd.backward
        autograd.backward = self.backward

    def stop(self, error: BaseException | None = None) -> None:
        """Take everything out again; `error` is one that ran out of memory and ended the training."""
        for forward in self._forwards:
            forward.remove()
        self._last = None
        if error is not None and not self._given_up:
            self._refuse("nothing is run again, as that was outside of the model's call and its backward pass")
        self.log.batch_ends(is_complete=False)
        autograd: Any = sys.modules["torch"].autograd
        if getattr(autograd.backward, "__self__", None) is self:
            autograd.backward = self._original

    # --- a call of the model -------------------------------------------------------------------------------------------------

    def call(self, forward: GuardedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module; in pieces if it has to be."""
        torch: Any = sys.modules["torch"]
        if self._is_inside or threading.get_ident() != self._thread or captures(torch):
            return forward.original(*args, **kwargs)
        self._last, self._passes_back = None, False
        self._calls += 1
        if not self._is_in_step:
            self._given_up = False
        state = StateBefore(self._statistics((forward.module,)) if self._norms_allowed and torch.is_grad_enabled() else [])
        if state.has_grad and (self._redoes or self._is_in_step):
            self._last = _Call(forward, args, kwargs, state)
        self._is_inside = True  # not by `_inside`, whose generator takes 9,000 instructions in each call
        try:
            output = self._tried(forward, args, kwargs, state)
        finally:
            self._is_inside = False
        if self._last is not None and not self._is_in_step:
            self._last.watch(output)
        return output

    def _tried(self, forward: GuardedForward, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateBefore) -> Any:
        """Call a module whole or in pieces, smaller ones each time that memory runs out."""
        first: BaseException | None = None
        has_grad = state.has_grad
        former, collectives = self.sizes[has_grad], self._collectives()
        while True:
            try:
                output = self._once(forward, args, kwargs, has_grad=has_grad)
                if first is not None:
                    let_go(first)
                return output
            except UndividableError as reason:
                self.sizes[has_grad] = former if first is not None else None
                if first is None:  # divided from the first call on: it runs as it is
                    self._refuse_to_divide(reason, raises=False)
                    continue
                self._refuse_to_divide(reason)
                raise first from None
            except Exception as error:
                if not self._may_retry(error, forward.module, collectives):
                    raise
                first, failed = first or error, error
            if self._has_room(failed, cleared(failed, state), has_grad=has_grad):
                continue
            del failed
            try:
                self._take_smaller(forward, args, kwargs, state)
            except UndividableError as reason:
                self.sizes[has_grad] = former
                self._refuse_to_divide(reason)
                raise first from None

    def _once(self, forward: GuardedForward, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_grad: bool) -> Any:
        size = self.sizes[has_grad]
        if size is None:
            return forward.original(*args, **kwargs)
        batch = DividableCall(args, kwargs)
        if batch.items <= size:
            return forward.original(*args, **kwargs)
        self.log.begin()
        return divided(forward.original, batch, size, lambda: self._again(forward.module))

    @contextmanager
    def _again(self, module: Any) -> Iterator[None]:
        """Be in a piece that is computed again, in a backward pass."""
        begun = self.log.repeat_begins()
        try:
            with self._inside(), frozen_statistics(module):
                yield
        finally:
            self.log.repeat_ends(begun)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        former, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = former

    def _statistics(self, modules: Iterable[Any]) -> list[Any]:
        """Return the running statistics that calls change and that have to be put back."""
        return [buffer for module in modules for norm in batch_norms(module) for buffer in norm.buffers(recurse=False)]

    def _collectives(self) -> int:
        """Return a number that each collective of this rank raises; 0 where it was alone at the start."""
        return 0 if self._was_alone else collectives_so_far()

    def _may_retry(self, error: BaseException, module: Any, collectives: int) -> bool:
        """Say whether an error ran out of memory and may be survived; if only the latter is not so, say why.

        `collectives`: their number in this rank when the try began.
        """
        if self._given_up or not is_out_of_memory(error):
            return False
        if not is_alone() and (self._passes_back or collectives_so_far() != collectives):
            what = "the gradients of this backward pass" if self._passes_back else "tensors of this batch"
            self._refuse(f"nothing is run again, as the other ranks may have exchanged {what} with this one already")
            return False
        reason = obstacle(module, piecewise_batch_norm=self._norms_allowed)
        if reason:
            self._refuse_to_divide(reason)
        return not reason

    def _take_smaller(self, forward: GuardedForward, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateBefore) -> None:
        """Halve the pieces.

        Raises:
            UndividableError: it cannot be done.
        """
        batch, has_grad = DividableCall(args, kwargs), state.has_grad
        size = min(self.sizes[has_grad] or batch.items, batch.items)
        norms = bool(batch_norms(forward.module))
        least = _LEAST_WITH_NORM if norms else 1
        if size <= least:
            raise UndividableError(f"{'one item' if least == 1 else 'two items'} at a time does not fit either")
        if not forward.is_tried:
            with self._inside(), nullcontext() if is_alone() else no_collectives(UndividableError):
                forward.draws = try_small(forward.module, forward.original, batch, state.generators.restore)
            state.restore()  # autocast's cache is of a call without gradients
            forward.is_tried = True
        self.sizes[has_grad] = size = max(least, -(-size // 2))
        change = SurvivalChange(
            where=self.log.where(),
            trains=has_grad,
            batch=batch.items,
            size=size,
            pieces=-(-batch.items // size),
            is_piecewise_norm=norms,
            draws=forward.draws,
        )
        if has_grad:
            self.log.divide(change)
        else:
            self.log.tell(change)

    # --- a backward pass -----------------------------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Stand in for `torch.autograd.backward`, guarded where it fills the gradients of a training."""
        original, given = self._original, (tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if create_graph or inputs is not None or self._is_in_backward or threading.get_ident() != self._thread:
            original(*given)
            return
        kept = None if self.is_zeroed else self._put_aside()
        self._is_in_backward = self._passes_back = True
        is_complete = False
        try:
            try:
                original(*given)
            except Exception as error:
                if not self._is_redone(error, original, given, kept):
                    raise
            is_complete = True
        finally:
            self._is_in_backward = False
            if not is_complete:
                self._drop_new(kept)
            if is_complete or not self._is_in_step:
                self._last = None
            if kept:
                add_gradients(kept, is_complete=is_complete)
        self.is_zeroed = False
        self.passes += 1
        self.log.batch_ends(is_complete=True)

    def _put_aside(self) -> list[tuple[Any, Any]]:
        """Take away the gradients from before a pass, so that they are untouched where it fails; return them."""
        kept = [(parameter, gradient) for parameter in self.parameters if (gradient := parameter.grad) is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def _drop_new(self, kept: list[tuple[Any, Any]] | None) -> None:
        """Forget the gradients of a pass that failed; `kept` is None where they were added to zeros."""
        for parameter in self.parameters:
            if kept is not None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _is_redone(
        self,
        error: BaseException,
        original: Callable[..., None],
        given: tuple[Any, ...],
        kept: list[tuple[Any, Any]] | None,
    ) -> bool:
        """Run the call and its backward pass again in pieces, by the outputs' gradients; say whether it was possible."""
        call = self._last
        if call is None or not self._redoes or self._is_in_step:
            return False
        if not self._may_retry(error, call.forward.module, collectives_so_far()):
            return False
        torch: Any = sys.modules["torch"]
        reached = reached_outputs(given[0], set(call.outputs))
        used = [place for place, output in enumerate(call.outputs) if output in reached]
        if not used or None in reached or any(place not in call.gradients for place in used):
            self._refuse("the loss cannot be computed again outside of a function that is given to `survive`")
            return False
        if given[2] or DividableCall(call.args, call.kwargs).requires_grad:
            self._refuse("the graph is needed once more")
            return False
        drop_saved(list(reached.values()))
        reached.clear()
        gradients, outer, failed, former = (
            [call.gradients[place] for place in used],
            autocast_now(torch),
            error,
            self.sizes[True],
        )
        try:
            while True:
                self._drop_new(kept)
                has_room = self._has_room(failed, cleared(failed, call.state), has_grad=True)
                try:
                    if not has_room:
                        self._take_smaller(call.forward, call.args, call.kwargs, call.state)
                    with torch.enable_grad(), self._inside():
                        output = self._once(call.forward, call.args, call.kwargs, has_grad=True)
                    outputs = _computed(output)
                    del output
                    original([outputs[place] for place in used], gradients)
                except UndividableError as reason:
                    self.sizes[True] = former
                    self._refuse_to_divide(reason)
                    return False
                except Exception as again:
                    if not is_out_of_memory(again):
                        raise
                    failed = again
                else:
                    let_go(error)
                    let_go(failed)
                    return True
                outputs = []
        finally:
            set_autocast(torch, outer)

    # --- a step --------------------------------------------------------------------------------------------------------------

    def step(self, run: Callable[[], Any], reset: Callable[[], None] = lambda: None) -> Any:
        """Run one step, from the model's call to its first backward pass at least; again, in pieces, if memory runs out before.

        Args:
            run: the step.
            reset: lets go of everything that a failed try left.
        """
        torch: Any = sys.modules["torch"]
        if self._is_in_step or threading.get_ident() != self._thread or captures(torch) or not torch.is_grad_enabled():
            return run()
        self._is_in_step, self._given_up = True, False
        try:
            return self._stepped(run, reset)
        finally:
            self._is_in_step, self._last = False, None

    def _stepped(self, run: Callable[[], Any], reset: Callable[[], None]) -> Any:
        state = StateBefore(self._statistics(self.modules) if self._norms_allowed else [])
        first: BaseException | None = None
        passes, former = self.passes, self.sizes[True]
        collectives, weights, scales = self._collectives(), self._weights(), self._scales()
        while True:
            self._forget_call()
            try:
                result = run()
                if first is not None:
                    let_go(first)
                return result
            except Exception as error:
                if self._given_up or not is_out_of_memory(error):
                    raise
                call = self._last
                if self.passes != passes or call is None:
                    where = "before the model's call" if call is None and self.passes == passes else "after the backward pass"
                    self._refuse(f"nothing is run again, as that was {where}")
                    raise
                if weights != self._weights() or scales.items() - self._scales().items():
                    self._refuse("nothing is run again, as the step had changed weights or the scale before")
                    raise
                if not self._may_retry(error, call.forward.module, collectives):
                    raise
                first, failed = first or error, error
            self._last = None
            reset()
            if self._has_room(failed, cleared(failed, state), has_grad=True):
                continue
            del failed
            try:
                self._take_smaller(call.forward, call.args, call.kwargs, call.state)
            except UndividableError as reason:
                self.sizes[True] = former
                self._refuse_to_divide(reason)
                raise first from None
            state.restore()

    def _forget_call(self) -> None:
        self._last = None  # not in place: a type checker would take it for None after the step, which sets it

    def _weights(self) -> int:
        """Return a mark of the weights that changes when those do: versions only rise, so their sum does."""
        return sum(map(_VERSION, self.parameters))

    def _scales(self) -> dict[int, Any]:
        """Return marks of the scalers that change when those do."""
        marks: dict[int, Any] = {}
        for scaler in self.scalers:
            marks |= {id(each): each._version for each in (scaler._scale, scaler._growth_tracker) if each is not None}
            marks[id(scaler)] = tuple((key, each["stage"]) for key, each in scaler._per_optimizer_states.items())
        return marks

    # --- what both do --------------------------------------------------------------------------------------------------------

    def _has_room(self, failed: BaseException, nbytes: int, *, has_grad: bool) -> bool:
        """Say whether there is room in one piece for all that a failed try had and asked for, also by moving tensors."""
        now = self.passes if has_grad else self._calls
        batch, least = self._moved.get(has_grad, (-_APART, 0))
        if 0 < now - batch < _APART:
            return False
        need = room_needed(failed, nbytes, least + least // 2 if now == batch else 0)
        if not need:
            return False
        self._moved[has_grad] = now, need
        made = room_for(need)
        if made is not None and made.state == "made":
            self.log.tell(SurvivalChange(where=self.log.where(), trains=has_grad, moved=made.nbytes))
        return made is not None and made.state in ("made", "free")

    def _refuse_to_divide(self, reason: object, *, raises: bool = True) -> None:
        self._refuse(f"the model's call cannot be divided, as {reason}", raises=raises)

    def _refuse(self, reason: str, *, raises: bool = True) -> None:
        self._given_up = raises
        self.log.refuse(reason, raises=raises)
