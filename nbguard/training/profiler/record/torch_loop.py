"""The functions that every training loop calls, marked in the log: torch's loaders, modules, backward pass and optimizers."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.phase_log import LogPosition
from nbguard.training.profiler.record.fit_bounds import Begins, FitBounds
from nbguard.training.profiler.record.model_calls import CallArguments, weak_arguments
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import STEPPED, Recorder

# --- The calls of one batch around functions that do nothing, whose time is nbguard's own cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """nbguard's own calls in a batch: the calls in their order, the one that is given the loss apart."""

    before: tuple[Callable[[], Any], ...]
    loss: Callable[[Any], Any]
    after: tuple[Callable[[], Any], ...]


class Rehearsed:
    """Stands in for an object of the user's where a batch is rehearsed."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @staticmethod
    def act(*_: Any) -> None:
        """Do nothing."""


# --- torch loop


Function = Callable[..., Any]
_ENGINE = "_engine_run_backward"
"""The function that `backward` and `grad` go through; `grad` itself may have been imported by its name."""

_ref = weakref.ref  # every batch makes one
_FIRST = 3  # sampled batches of an iterator: its purpose shows in them


class TorchLoop:
    """Marks the phases of any loop over torch. While the recorder is `in_learner` fastai's own events tell them apart.

    Most calls of a fit are only passed on: that takes one check whether they are `inside`. Calls of modules inside of modules
    are not even that where only some batches are sampled: there the marks are around the classes that were seen outermost.

    Code that every batch runs puts an attribute into a variable before it calls it: where one is read and called at once,
    CPython 3.11 looks for it on the class, too.
    """

    watches = "phases of the loop"

    def __init__(self, recorder: Recorder, begins: Begins | None = None) -> None:
        """`begins` is called where another fit begins."""
        self.fits: FitBounds = FitBounds(recorder, begins or _ignore)
        self._recorder = recorder
        self._patches = Patches()
        self._calls = Patches()
        self._copies = Patches()
        self._engines = Patches()
        self._has_copied = False  # whether the loop made any since the stretch began
        self._are_watched = False  # calls of modules
        self._codes: dict[type, int] = {}  # the phases of modules that the loop itself has called, by their classes
        self._hooks: list[Any] = []
        self._step, self._backward_code = recorder.code(phases.STEP), recorder.code(phases.BACKWARD)
        self._steps: list[int] = []  # codes of the phases around optimizers' steps; of a step that failed it stays
        self._model: Callable[[], Any] = _nothing
        self._is_to_train = False  # a model in training mode that records gradients was called since the pass began
        self._iterator: Callable[[], Any] = _nothing  # the one that was asked last, and its number
        self._number = 0
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)

    def start(self) -> None:
        """Put the marks in."""
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        put = self._patches.put
        put(dataloader._BaseDataLoaderIter, "__next__", self._next)
        put(dataloader._MultiProcessingDataLoaderIter, "__init__", self.timed(phases.WORKERS))
        put(torch.autograd, "backward", self._backward)
        put(torch.optim.Optimizer, "__init__", self._optimizer)
        put(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self.watch_modules()
        self._recorder.subscribe("stretch", self._turn)
        before_step, after_step = self._around_step()
        self._hooks = [
            optimizer.register_optimizer_step_pre_hook(before_step),
            optimizer.register_optimizer_step_post_hook(after_step),
        ]

    def ended(self, error: BaseException | None) -> None:
        """Note that the fit is over, with the exception that ended it or None."""
        if error is not None and self._is_to_train:
            self._recorder.boundary("cut")

    def stop(self) -> None:
        """Take the marks out."""
        self._patches.restore()
        self._copies.restore()
        self._engines.restore()
        self.leave_modules()
        self._codes.clear()
        while self._hooks:
            self._hooks.pop().remove()
        self._model = _nothing

    def watch_modules(self) -> None:
        """Have calls of the outermost modules marked: calls of all modules pass here."""
        self._are_watched = True
        self._turn(begins=True)

    def leave_modules(self) -> None:
        """Leave modules as they are: a Learner says itself when its model is called."""
        self._are_watched = False
        self._calls.restore()

    def _turn(self, begins: bool) -> None:
        """Watch all modules while all batches are sampled, and else those of classes that were called by the loop.

        Copies are marked meanwhile, and afterwards only in a loop that made any: tensors on their device already come back as
        they are. In a Learner's fit the functions that copy its batches are marked.
        """
        import torch

        self._engines.restore()
        if begins:
            self._engines.put(torch.autograd, _ENGINE if hasattr(torch.autograd, _ENGINE) else "grad", self._engine)
            self._has_copied = False
            if not self._copies.are_in:  # the marks stay below patches that others have put in since
                for name in ("to", "cuda"):
                    self._copies.put(torch.Tensor, name, self.timed(phases.TO_DEVICE, notes_copies=True))
        elif not (self._has_copied and self._are_watched):
            self._copies.restore()
        if not self._are_watched:
            return
        every: tuple[type, ...] = (torch.nn.Module,)
        try:
            self._mark_calls_of(every if begins else tuple(self._codes), torch)
        except Exception:  # noqa: BLE001 - a class that cannot be changed: then all are watched on
            self._mark_calls_of(every, torch)

    def _mark_calls_of(self, classes: tuple[type, ...], torch: Any) -> None:
        self._calls.restore()
        module = self._module(torch)  # one for all: each reads its referents
        for cls in classes:
            self._calls.put(cls, "__call__", module)

    def calls(self, module: Any, args: Any) -> None:
        """Emit that the outermost module is about to be called."""
        recorder, model = self._recorder, self._model
        if recorder.losses >= recorder.begins_by_hand and recorder.current != self._backward_code:  # else it is called again
            recorder.begin_batch_by_hand()
        if model() is not module:
            model = self._model = _reference(module)
            if model is not _nothing:
                self.fits.model(module)
            self._is_to_train = self._is_to_train or (getattr(module, "training", None) is True and _records_gradients())
            recorder.emit("model", module, args)
        try:
            held: Any = tuple(map(_ref, args))
        except TypeError:  # one is no tensor
            held = weak_arguments(args)
        names = args.names if type(args) is CallArguments else ()
        recorder.calls.note((recorder.batches, recorder.losses, model, held, names))
        if recorder.hears:
            recorder.emit("forward", module, args)

    def begins_to_train(self) -> None:
        """Note that there is a loss to train on, the first one since a loop may have begun."""
        self._recorder.aside(self.fits, "loss", self.fits.trains)

    def begins_fit(self) -> None:
        """Emit the next module that is called, whatever was called before: another fit began."""
        self._model = _nothing

    def rehearsal(self) -> Rehearsal:
        """Return the calls of a batch around functions that do nothing, whose time is nbguard's own."""
        import torch

        iterator, optimizer, batch = Rehearsed(), Rehearsed(), torch.zeros((), device="cpu")
        model, measure = torch.nn.Identity(), torch.nn.MSELoss()
        call = self._module(torch)(Rehearsed.act)
        before_step, after_step = self._around_step()
        return Rehearsal(
            before=(partial(self._next(Rehearsed.act), iterator), partial(call, model, batch), partial(call, measure, batch)),
            loss=self._backward(Rehearsed.act),
            after=(
                partial(before_step, optimizer),
                partial(after_step, optimizer),
                partial(self._zero_grad(Rehearsed.act), optimizer),
            ),
        )

    def timed(self, phase: str, *, after: str = "", notes_copies: bool = False) -> Callable[[Function], Function]:
        """Return a patch that marks the time of a call as `phase`, outside modules and loaders only.

        `after`: the phase that the call ends, if not the one that goes on. `notes_copies`: note where its result is not the
        tensor that it was called for.
        """
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        code, ended = recorder.code(phase), recorder.code(after) if after else None

        def around(original: Function) -> Function:
            def timed(*args: Any, **kw: Any) -> Any:
                __tracebackhide__ = True
                if recorder.inside or get_ident() != recorder.thread:
                    return original(*args, **kw)
                before = recorder.current
                add((before if ended is None else ended, clock()))
                recorder.current = code
                recorder.inside = 1
                try:
                    result = original(*args, **kw)
                    if notes_copies and result is not args[0]:
                        self._has_copied = True
                    return result
                finally:
                    recorder.inside = 0
                    recorder.current = before
                    add((code, clock()))

            return timed

        return around

    def _next(self, original: Function) -> Function:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        wait = recorder.code(phases.WAIT)

        def __next__(iterator: Any) -> Any:  # noqa: N807 - it stands in for it
            __tracebackhide__ = True
            if recorder.loading or get_ident() != recorder.thread:
                recorder.elsewhere = recorder.elsewhere or not recorder.loading
                return original(iterator)
            latest = self._iterator
            if latest() is iterator:
                number = self._number
                if recorder.has_new_loop:
                    self.fits.asked_again(number)
            elif (asked := recorder.attempt(self, "a batch", self._number_of, iterator)) is not None:
                number = asked
            else:
                return original(iterator)
            if self._steps and not recorder.inside:
                recorder.current = self._steps[0]
                self._steps.clear()
            recorder.begin_batch(number)  # has marked the time up to here
            before, recorder.current = recorder.current, wait
            recorder.inside += 1
            recorder.loading = 1
            try:
                return original(iterator)
            except StopIteration:
                recorder.end_of(number)
                self.fits.ended(number)
                raise
            finally:
                recorder.inside -= 1
                recorder.loading = 0
                recorder.current = before
                add((wait, clock()))
                if recorder.hears:
                    recorder.emit("phase", wait)
                    recorder.emit("waited")

        return __next__

    def _number_of(self, iterator: Any) -> int:
        """Return the number of an iterator that is not the one asked before; emit one that is asked for the first time."""
        number = self._numbers.get(iterator)
        if number is None:
            self._numbers[iterator] = number = next(self._count)
            self._model, self._is_to_train = _nothing, False
            self._recorder.look_at(_FIRST)
            self.fits.loader(iterator)
            self._recorder.emit("loader", iterator)
        self._iterator, self._number = weakref.ref(iterator), number
        return number

    def _module(self, torch: Any) -> Callable[[Function], Function]:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        forward, loss = recorder.code(phases.FORWARD), recorder.code(phases.LOSS)
        losses = torch.nn.modules.loss._Loss
        is_compiling = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
        traced = torch._C._get_tracing_state  # of torch.jit.trace, which records each look at a module
        known = self._codes.get  # no code of these is 0

        def code_of(cls: type) -> int:
            code = self._codes[cls] = loss if issubclass(cls, losses) else forward
            return code

        def around(original: Function) -> Function:
            def __call__(module: Any, *args: Any, **kw: Any) -> Any:  # noqa: N807 - it stands in for it
                __tracebackhide__ = True
                # Asked first: it is a constant while torch.compile traces, which then does not look at the rest.
                if is_compiling() or recorder.inside or get_ident() != recorder.thread:
                    return original(module, *args, **kw)
                code = known(type(module)) or code_of(type(module))
                if code == forward:
                    if traced() is not None:
                        return original(module, *args, **kw)
                    self.calls(module, CallArguments.of(args, kw) if kw else args)
                before = recorder.current
                add((before, clock()))
                recorder.current = code
                recorder.inside = 1
                try:
                    result = original(module, *args, **kw)
                finally:
                    recorder.inside = 0
                    recorder.current = before
                    add((code, clock()))
                    if recorder.hears:
                        recorder.emit("phase", code)
                if recorder.hears and code == forward:
                    recorder.emit("output", result)
                return result

            return __call__

        return around

    def _backward(self, original: Function) -> Function:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        code = self._backward_code

        def backward(tensors: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread or recorder.in_learner:
                return original(tensors, *args, **kw)
            if recorder.has_new_loop:
                self.begins_to_train()
            if recorder.hears:
                recorder.retains = _retains(*args, **kw)
            if recorder.log_loss(tensors):
                recorder.emit("loss", tensors)
            before = recorder.current
            add((before, clock()))
            recorder.current = code
            try:
                result = original(tensors, *args, **kw)
            finally:
                recorder.current = before
                add((code, clock()))
                if recorder.hears:
                    recorder.kept = recorder.kept + 1 if _keeps_graph(*args, **kw) else 0
                    recorder.emit("phase", code)
                    recorder.emit("backward")
            if recorder.usual_gradients is not None:
                recorder.has_gradients()
            return result

        return backward

    def _engine(self, original: Function) -> Function:
        recorder = self._recorder

        def run(*args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if recorder.hears and get_ident() == recorder.thread and sys._getframe(1).f_code.co_name != "backward":
                recorder.emit("grad")
            return original(*args, **kw)

        return run

    def _optimizer(self, original: Function) -> Function:
        def __init__(optimizer: Any, *args: Any, **kw: Any) -> None:  # noqa: N807 - it stands in for it
            __tracebackhide__ = True
            original(optimizer, *args, **kw)
            if get_ident() == self._recorder.thread:
                self._recorder.attempt(self.fits, "an optimizer", self.fits.optimizer)
                self._model = _nothing  # the next one that is called is known, whatever was called before

        return __init__

    def _zero_grad(self, original: Function) -> Function:
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        code = recorder.code(phases.ZERO_GRAD)

        def zero_grad(optimizer: Any, *args: Any, **kw: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread or recorder.in_learner:
                return original(optimizer, *args, **kw)
            if recorder.hears:
                recorder.emit("zero_grad", optimizer, next(iter((*args, *kw.values())), None))
            before = recorder.current
            add((before, clock()))
            recorder.current = code
            try:
                return original(optimizer, *args, **kw)
            finally:
                recorder.current = before
                add((code, clock()))
                if recorder.hears:
                    recorder.emit("phase", code)

        return zero_grad

    def _around_step(self) -> tuple[Function, Function]:
        """Return the functions that are called before and after each step of an optimizer.

        A closure that it calls is the loop's own code, as Lightning's, which has the training step of the user in it.
        """
        recorder, add, clock = self._recorder, self._recorder.add, self._recorder.clock
        step, steps = self._step, self._steps

        def before_step(optimizer: Any, args: tuple[Any, ...] = (), named: Any = None) -> Any:
            if get_ident() != recorder.thread or recorder.in_learner:
                return None
            is_given = len(args) > 1 or named
            if is_given:
                recorder.has_closure = callable(closure_of(args, named))
            recorder.steps(optimizer)
            before = recorder.current
            steps.append(before)
            add((before, clock()))
            recorder.current = step
            if not is_given or not recorder.has_closure:
                return None
            around = around_closure(closure_of(args, named), before)
            return ((args[0], around, *args[2:]), named) if len(args) > 1 else (args, {**named, "closure": around})

        def closure_of(args: tuple[Any, ...], named: Any) -> Any:
            return args[1] if len(args) > 1 else named.get("closure")

        def around_closure(original: Function, code: int) -> Function:
            def closure(*args: Any, **kw: Any) -> Any:
                __tracebackhide__ = True
                if get_ident() != recorder.thread or recorder.in_learner:
                    return original(*args, **kw)
                recorder.has_closure = False  # of the next step
                before = recorder.current
                add((before, clock()))
                recorder.current = code
                try:
                    return original(*args, **kw)
                finally:
                    add((recorder.current, clock()))
                    recorder.current = before

            return closure

        def after_step(*_: Any) -> None:
            if steps and get_ident() == recorder.thread and not recorder.in_learner:
                recorder.current = steps.pop()
                recorder.has_stepped = True
                add((step, clock()) + STEPPED)  # noqa: RUF005 - to unpack makes a list first
                if recorder.hears:
                    recorder.emit("phase", step)

        return before_step, after_step


def _keeps_graph(_gradients: Any = None, retain_graph: Any = None, create_graph: Any = False, *_: Any, **_kw: Any) -> bool:
    """Say whether the arguments of a backward pass, its tensors apart, leave the graph alive."""
    return (create_graph if retain_graph is None else retain_graph) is True


def _retains(_gradients: Any = None, retain_graph: Any = None, create_graph: Any = False, *_: Any, **_kw: Any) -> bool:
    """Say whether the arguments of a backward pass ask for its graph to stay, as none does that makes a graph itself."""
    return retain_graph is True and create_graph is not True


def _reference(module: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(module)
    except TypeError:  # a Learner may take any callable for its model: it is emitted at each call
        return _nothing


def _records_gradients() -> bool:
    """Say whether operations are recorded for a backward pass."""
    import torch

    return bool(torch.is_grad_enabled())


def _ignore(at: LogPosition, iterator: Any) -> None:
    """Take all fits for one."""


def _nothing() -> None:
    """Stand in for a weak reference to a model where there is none."""
