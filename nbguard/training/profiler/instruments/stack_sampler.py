"""Looks at the stack of the fit's thread from time to time, for the names of code that takes long and has no phase of its own.

Another thread looks: at first every 8 ms, in longer fits more rarely, up to every 100 ms. A sample costs the fit about 300 µs,
200 of them to wake that thread and to hand it the interpreter's lock; so from some 0.5 s on it is 1 % of the time or less.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from types import CodeType, FrameType
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.memory.scan.libraries import below_packages, framework_folders, library_paths
from nbguard.memory.scan.parked import hooks_of
from nbguard.processor_time import thread_time_ns
from nbguard.training.profiler.analysis.time.stacks import IMPORTS, HookFacts, StackLine, StackSamples, known_call
from nbguard.training.profiler.nonfinite.device_losses import DeviceLosses, LossHistory
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.model_calls import NAME, ModuleSet
from nbguard.training.profiler.record.recorder import Event, Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop

# --- The cost of the profile itself, rehearsed in the fit, in caches that are full of the user's code and data.


_EVENTS: tuple[Event, ...] = ("waited", "backward", "step", "zero_grad")
"""At each of these one call of ours is rehearsed, in sampled batches. The call that takes a loss has an event of its
own, and gets the loss of the fit."""
_ENOUGH = 9
"""Times that each of them is timed; of a long fit's calls none is any more."""
_COLD = 2
"""Times as much as rehearsed that a call costs in a fit: others of ours have just run before a rehearsal, and none before the
call itself; and the user's code has to read its part of the caches again. Seen by tests/benchmarks/profile_overhead.py."""
_BEFORE = 40
"""Batches that are rehearsed at first: a recorder looks at those closely."""


class OverheadWatch:
    """Calls now and then one of the functions that are ours in every batch, around nothing, and times it.

    They belong to a recorder of their own, which has a history of the losses of its own.
    """

    watches = "the cost of the profile itself"

    def __init__(self) -> None:
        self._is_learners = False
        self._recorder = Recorder()
        self._calls: tuple[Callable[[], Any], ...] = ()
        self._taken: list[list[int]] = []  # nanoseconds of processor time of each call
        self._loss: Callable[[Any], Any] = _nothing
        self._taken_by_loss: list[int] = []
        self._turn = 0
        self._marks = 0.0  # in a batch

    def start(self, recorder: Recorder) -> None:
        """Wait for the first model that is called."""
        import torch

        self._torch: Any = torch
        self._of = recorder
        self._late = DeviceLosses(torch, self._recorder.__len__, _nothing)
        recorder.subscribe("learner", self._learner)
        recorder.subscribe("model", self._model)

    def stop(self) -> None:
        """Rehearse no more. The log of the rehearsal says how many marks are in a batch."""
        batches = [boundary.at for boundary in self._recorder.stop().boundaries if boundary.kind == "batch"]
        self._marks = median([after - before for before, after in pairwise(batches)]) if len(batches) > 1 else 0
        self._calls, self._loss = (), _nothing
        self._late.forget()

    def observe(self) -> int:
        """Return the nanoseconds that one mark costs the fit, with its share of everything else that is done in a batch."""
        if not (self._marks and self._taken and all(self._taken)):
            return 0
        *calls, nothing = (median(taken) for taken in self._taken)
        if self._taken_by_loss:  # there are none where a model is only evaluated
            calls.append(median(self._taken_by_loss))
        return max(0, round(_COLD * sum(taken - nothing for taken in calls) / self._marks))

    def _learner(self, _: Any) -> None:
        self._is_learners = True

    def _model(self, _module: Any, _args: Any) -> None:
        self._of.unsubscribe("model", self._model)
        loop = TorchLoop(self._recorder)
        front = LearnerLoop(self._recorder, loop) if self._is_learners else loop
        with self._torch._C.DisableTorchFunction():
            history = LossHistory(self._torch, self._late.send)
            self._recorder.usual_loss, loss = history.is_usual, self._torch.zeros((), device="cpu")
            history.note(0.0, ())
            batch = front.rehearsal()
            calls: list[Callable[[], Any]] = [*batch.before, partial(batch.loss, loss), *batch.after]
            for call in calls * _BEFORE:
                call()
        self._calls, self._loss = (*batch.before, *batch.after, _nothing), batch.loss
        self._taken = [[] for _ in self._calls]
        for event in _EVENTS:
            self._of.subscribe(event, self._rehearse)
        self._of.subscribe("loss", self._rehearse_loss)

    def _rehearse(self, *_: Any) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._calls)
        self._time(self._taken[turn], self._calls[turn])
        if len(self._taken[-1]) >= _ENOUGH:  # the last one's turn comes last
            for event in _EVENTS:
                self._of.unsubscribe(event, self._rehearse)

    def _rehearse_loss(self, loss: Any) -> None:
        self._time(self._taken_by_loss, self._loss, loss)
        self._late.forget()  # a sampled batch holds no loss
        if len(self._taken_by_loss) >= _ENOUGH:
            self._of.unsubscribe("loss", self._rehearse_loss)

    def _time(self, taken: list[int], call: Callable[..., Any], *facts: Any) -> None:
        with self._torch._C.DisableTorchFunction():
            start = thread_time_ns()
            call(*facts)
            taken.append(thread_time_ns() - start)


def _nothing(*_: Any) -> None:
    pass


_SHORTEST, _LONGEST = 0.008, 0.1
"""Seconds between two looks, at first and at most."""
_OFTEN = 16
"""Samples until the time between two grows with each, by one part in so many: so it stays that part of the time since the
first sample. Code that holds the interpreter's lock at the beginning, as a collection, leaves as many samples for the rest.
So does an import: after one that took as many samples they are counted from the start.
"""
_MOST = 4096
"""Stacks that are told apart."""
_CALLERS = 256
"""Calls that a loop makes whose stacks are kept,"""
_OF_A_LOOP = 12
"""and of these, calls for a loss, a step and cleared gradients: the first of each loop."""
_TURN = 1.0
"""Most seconds that a sampling thread may hold the interpreter's lock; a sample itself takes some 50 µs."""
_CHANGE = 3.5
"""Cost of a sample in multiples of the sampling thread's processor time, with the change of threads and the fit's thread
included, which loses the lock and takes it again.
"""
_SCHEDSTAT = 64
"""Bytes of `/proc/…/schedstat` that are read: nanoseconds on a processor, nanoseconds waiting for one, and turns."""

_Stack = tuple[Any, ...]  # code and instruction of each frame in turn, the innermost first
_Key = tuple[int, ...]
"""A stack as numbers: the ids of its codes, then the instructions. To hash a code object is to hash all its constants."""


class StackSampler:
    """Notes which lines the fit's thread is at. Keeps code objects until the fit ends, and no frame."""

    watches = "names of slow code"

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._stacks: list[_Stack] = []  # by their numbers: each id in a key is of a code that is held here
        self._moments: list[int] = []
        self._seen: list[int] = []
        self._callers: list[tuple[int, int]] = []  # moment, and number of the stack
        self._left = _OF_A_LOOP
        self._took = 0  # nanoseconds of processor time that looks cost, those of the fit's thread, too
        self._waits: list[int] = []
        self._ran: list[int] = []
        self._schedstat: int | None = None  # file of the kernel's counts of the fit's thread
        self._models = ModuleSet()
        self._adding = threading.Lock()  # both threads number stacks
        self._ended = threading.Lock()
        self._thread: threading.Thread | None = None
        self._samples = StackSamples()

    def start(self, recorder: Recorder) -> None:
        """Begin to look at the thread of the recording."""
        recorder.subscribe("loader", self._loader)
        recorder.subscribe("model", self._model)
        recorder.subscribe("loss", self._acts)
        recorder.subscribe("step", self._acts)
        recorder.subscribe("zero_grad", self._acts)
        self._ended.acquire()
        self._clock, self._turn, self._of = recorder.clock, recorder.turn, recorder.thread_of_fit
        self._schedstat = _opened_schedstat()
        self._thread = threading.Thread(target=self._look, name="nbguard stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and write down the samples."""
        if self._thread is None:
            return
        self._ended.release()
        self._thread.join()
        self._thread = None
        if self._schedstat is not None:
            os.close(self._schedstat)
        self._samples = self._written()
        self._numbers.clear()
        self._stacks.clear()
        self._callers.clear()

    def observe(self) -> StackSamples:
        """Return the samples; to be called after `stop`."""
        return self._samples

    def _model(self, module: Any, _: Any) -> None:
        self._models.add(module)
        self._note_caller()

    def _loader(self, _: Any) -> None:
        self._left = _OF_A_LOOP

    def _acts(self, *_: Any) -> None:
        if self._left:
            self._left -= 1
            self._note_caller()

    def _note_caller(self) -> None:
        """Note the stack of the loop's own calls: the user's functions in it run the loop."""
        if len(self._callers) < _CALLERS:
            number = self._number_of(_stack_of(sys._getframe(2)))
            if number is not None:
                self._callers.append((self._clock(), number))

    def _look(self) -> None:
        """Sample now and then, as the body of the thread.

        It waits and takes its turn inside of the loop's `zip`: a call of its own would be counted in the profile of a fetch
        that has the turn.
        """
        clock, turn = self._clock, self._turn
        looks, pause, fetched, imports = 0, [_SHORTEST], 0, False
        has_ended = map(self._ended.acquire, itertools.repeat(True), map(pause.__getitem__, itertools.repeat(0)))
        for is_over, _ in zip(has_ended, map(turn.lock.acquire, itertools.repeat(True)), strict=True):
            try:
                if is_over:
                    return
                if turn.ended > fetched:  # the time since the last sample was that fetch's, and no other code's
                    fetched = turn.ended
                    self._note(fetched, ())
                stack = _stack_of_thread(self._of)
                self._note(clock(), stack)
                self._took = round(_CHANGE * thread_time_ns())
                imported, imports = imports, any(code.co_filename.startswith(IMPORTS) for code in stack[::2])
                looks = 0 if imported and not imports and looks > _OFTEN else looks + 1
                pause[0] = _pause_after(looks)
            except Exception:  # noqa: BLE001 - out of memory: what was seen is worth something
                return
            finally:
                turn.lock.release()

    def _note(self, moment: int, stack: _Stack) -> None:
        number = self._number_of(stack)
        if number is None:
            return
        if self._schedstat is not None:
            ran, waited, _ = os.pread(self._schedstat, _SCHEDSTAT, 0).split()
            self._ran.append(int(ran))
            self._waits.append(int(waited))
        self._moments.append(moment)
        self._seen.append(number)

    def _number_of(self, stack: _Stack) -> int | None:
        """Return the number of a stack from now on, or None if there are too many."""
        key = (*map(id, stack[::2]), *stack[1::2])
        with self._adding:
            number = self._numbers.get(key)
            if number is None and len(self._stacks) < _MOST:
                number = self._numbers[key] = len(self._stacks)
                self._stacks.append(stack)
        return number

    def _written(self) -> StackSamples:
        sites, libraries, frameworks = Sites(), (*library_paths(), "<frozen"), framework_folders()
        numbers: dict[StackLine, int] = {}
        known: dict[tuple[CodeType, int], int] = {}
        stacks = []
        for stack in self._stacks:
            frames = list(zip(stack[::2], stack[1::2], strict=True))[::-1]
            for frame in frames:
                if frame not in known:
                    line = _line(*frame, sites, libraries, frameworks)
                    known[frame] = numbers.setdefault(line, len(numbers))
            stacks.append(tuple(known[frame] for frame in frames))
        hooks = tuple(hook for model in self._models for hook in _hooks_of(model))
        return StackSamples(
            lines=tuple(numbers),
            stacks=tuple(stacks),
            moments=tuple(self._moments),
            seen=tuple(self._seen),
            hooks=hooks,
            callers=tuple(self._callers),
            took=self._took,
            waits=tuple(self._waits),
            ran=tuple(self._ran),
        )


def _pause_after(looks: int) -> float:
    """Return the seconds between a sample, of so many, and the next."""
    return float(min(_SHORTEST * (1 + 1 / _OFTEN) ** max(0, looks - _OFTEN), _LONGEST))


def _stack_of_thread(thread: int) -> _Stack:
    """Return the stack of another thread, which does not run meanwhile.

    It would run if a garbage collection came between two frames, or if the turn of this thread ended there. CPython 3.11 may
    crash then: a frame that ended is walked (python/cpython issue 99110, getsentry/sentry-python issue 2386).
    """
    collects, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_TURN)
    try:
        return _stack_of(sys._current_frames().get(thread))
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


def _stack_of(frame: FrameType | None) -> _Stack:
    stack: list[Any] = []
    add = stack.extend
    while frame is not None:
        add((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(stack)


def _opened_schedstat() -> int | None:
    """Open the file where Linux counts this thread's waits for a processor, or None without it."""
    try:
        return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _line(code: CodeType, instruction: int, sites: Sites, libraries: tuple[str, ...], frameworks: Sequence[str]) -> StackLine:
    file = code.co_filename
    is_users = not file.startswith(libraries) and code.co_name != NAME
    place = sites.place(file) if is_users else below_packages(file, frameworks)
    is_users, number = is_users or place.startswith("In["), _number(code, instruction)
    return StackLine(
        name=getattr(code, "co_qualname", code.co_name),  # Python 3.10 does not know it
        file=place,
        line=number,
        first=code.co_firstlineno,
        is_users=is_users,
        call=known_call(linecache.getline(file, number)) if is_users else "",
    )


def _number(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or 0
    return 0


def _hooks_of(model: Any) -> Iterator[HookFacts]:
    """Yield the hooks that the modules of a model have."""
    for name, module in model.named_modules():
        for hooks in hooks_of(module):
            for hook in hooks.values():
                code = getattr(getattr(hook, "__func__", hook), "__code__", None)
                if type(code) is CodeType:
                    function = getattr(code, "co_qualname", code.co_name)
                    yield HookFacts(function=function, first=code.co_firstlineno, module=name, type=name_of(type(module)))
