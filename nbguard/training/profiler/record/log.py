"""The log of a fit as it grows, with two numbers for each mark and boundary, and the schedule of sampled batches."""

from __future__ import annotations

import struct
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FrameType, FunctionType
from typing import Any, get_args

from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.weak_references import weak_reference
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, LogPosition, PhaseLog
from nbguard.training.profiler.analysis.time.stacks import COMPREHENSIONS

# --- The latest calls of models, noted in every batch, read only where one of them has to be examined again.


# --- Attributes replaced for the time of a profile, and put back as they were found; the cost of the replaced calls.


# --- The calls of one batch around functions that do nothing, whose time is nbguard's own cost.


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


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Put:
    owner: Any
    name: str
    before: Any  # the owner's own attribute, _ABSENT if it was inherited
    after: Any


class Patches:
    """Replaces attributes of classes and modules; `restore` puts the very same objects back, the last replaced first.

    An attribute that somebody else has replaced meanwhile stays theirs: ours, which they call, then only passes the call on.
    """

    def __init__(self) -> None:
        self._puts: list[_Put] = []

    @property
    def are_in(self) -> bool:
        """Say whether anything is replaced."""
        return bool(self._puts)

    def put(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Replace `owner.name` by `around(owner.name)`; return False where the owner has no such function."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        after = wraps(original)(around(original))
        self._puts.append(_Put(owner, name, vars(owner).get(name, _ABSENT), after))
        setattr(owner, name, after)
        return True

    def restore(self) -> None:
        """Put everything back."""
        while self._puts:
            put = self._puts.pop()
            if vars(put.owner).get(put.name) is not put.after:
                continue
            if put.before is _ABSENT:
                delattr(put.owner, put.name)
            else:
                setattr(put.owner, put.name, put.before)


class CallArguments(tuple[Any, ...]):
    """All arguments of a call in a row, as if positional; the last ones were given by `names`."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], named: Mapping[str, Any]) -> CallArguments:
        """Return the values of a call, positional ones first."""
        arguments = cls((*args, *named.values()))
        arguments.names = tuple(named)
        return arguments


_KEPT = 16
_GONE = object()
_AS_THEY_ARE = frozenset((int, float, bool, str, bytes, type(None), weakref.ref))
_Call = tuple[int, int, Any, Any, tuple[str, ...]]
"""Number of the batch, number of losses before, reference to the model, arguments, and the names of the last ones."""


class ArgumentsGoneError(Exception):
    """The arguments of a call are not there any more."""


class ModelCalls:
    """The calls that led to the latest loss, or to the one that comes. Their arguments are held weakly unless they are kept.

    A call is a plain tuple, which `note` adds without a call of Python code: in a fit all that a batch touches is cold.
    """

    __slots__ = ("_calls", "note")

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_KEPT)
        self.note: Callable[[_Call], None] = self._calls.append

    def keep(self, args: Any) -> None:
        """Hold the arguments of the call noted last until `release`; and those of no earlier batch."""
        last = self._calls.pop()
        earlier = [call for call in self._calls if call[:2] == last[:2]]
        self._calls.clear()
        self._calls.extend((*earlier, (*last[:3], tuple(args), last[4])))

    def release(self) -> None:
        """Hold all arguments weakly from now on."""
        calls = [(*call[:3], weak(call[3]), call[4]) for call in self._calls]
        self._calls.clear()
        self._calls.extend(calls)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def latest(self) -> list[tuple[Any, Any, tuple[str, ...]]]:
        """Return reference to the model, arguments and names of the calls between two losses of a batch, in their order."""
        return [call[2:] for call in self._calls if call[:2] == self._calls[-1][:2]]


def weak_arguments(args: Any) -> Any:
    """Return the arguments of a call, held weakly."""
    try:
        return weak(tuple(args))
    except RecursionError:  # a list that holds itself
        return (_GONE,)


def weak(value: Any) -> Any:
    """Return a value with weak references in the place of all objects that allow them, in containers, too."""
    cls = type(value)
    if cls in (tuple, list):
        return cls([weak(item) for item in value])
    if cls is dict:
        return {key: weak(item) for key, item in value.items()}
    if cls in _AS_THEY_ARE:
        return value
    reference = weak_reference(value)
    return _GONE if reference is None else reference


def strong(value: Any) -> Any:
    """Return the value that `weak` was given.

    Raises:
        ArgumentsGoneError: a part of it is gone.
    """
    cls = type(value)
    if cls in (tuple, list):
        return cls([strong(item) for item in value])
    if cls is dict:
        return {key: strong(item) for key, item in value.items()}
    target = value() if cls is weakref.ref else value
    if value is _GONE or (target is None and value is not None):
        raise ArgumentsGoneError
    return target


# --- The turn of a fetch that is profiled, while nbguard's other threads run no Python.
#
# From Python 3.12 on a profiler takes the calls of all threads for calls of one.


_PATIENCE = 0.05  # seconds; a sample of a stack takes some 50 µs


class Turn:
    """A lock, held by the fetch that is profiled and by another thread that looks. It knows when the last such fetch ended."""

    __slots__ = ("_clock", "ended", "lock")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.lock = threading.Lock()
        self.ended: int = 0  # by the clock

    def begin(self) -> bool:
        """Take the turn; say whether it could be had."""
        return self.lock.acquire(timeout=_PATIENCE)

    def end(self) -> None:
        """Give it back."""
        self.ended = self._clock()
        self.lock.release()


# --- Lines of the user's, such as the one that led to a call, and calls that look as if made in such a line, e.g. a
# warning's.


NAME = "nbguard_call"
"""The name of the calling function, which tells it from the user's."""
_CALL = (lambda function, args, named, __tracebackhide__=True: function(*args, **named)).__code__.replace(co_name=NAME)  # noqa: ARG005


class CallsOnLines:
    """Keeps the code for each line that calls were made in."""

    def __init__(self) -> None:
        self._codes: dict[tuple[CodeType, int], CodeType] = {}

    def at(self, frame: FrameType) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
        """Return a function that calls another one, with these arguments, in the line where a frame is."""
        line = frame.f_code, frame.f_lineno
        code = self._codes.get(line)
        if code is None:
            file, number = line[0].co_filename, line[1]
            code = self._codes[line] = _CALL.replace(co_filename=file, co_firstlineno=number)
        return FunctionType(code, frame.f_globals, NAME, (True,))

    def clear(self) -> None:
        """Forget all lines."""
        self._codes.clear()


class CallLines:
    """Finds the line of the user's that has led to a call."""

    def __init__(self) -> None:
        self._libraries = (*library_paths(), "<frozen")
        self._known: dict[Any, bool] = {}

    def here(self) -> tuple[str, int, str] | None:
        """Return the file, the line and the function of the innermost frame that is no library's, or None."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_library = self._known.get(code)
            if is_library is None:
                is_library = self._known[code] = code.co_filename.startswith(self._libraries)
            if not is_library:
                return code.co_filename, frame.f_lineno, _function(code)
            frame = frame.f_back
        return None


def _function(code: CodeType) -> str:
    """Return the name of a function; of a comprehension, that of the function around it."""
    if code.co_name not in COMPREHENSIONS:
        return code.co_name
    around = getattr(code, "co_qualname", code.co_name).split(".")  # Python 3.10 does not know it
    return next((name for name in reversed(around) if name not in (*COMPREHENSIONS, "<locals>")), "<module>")


# --- The schedule of sampled batches: the first ones all, later fewer and fewer, and some in a row again in a long fit.


_ALL = 32
_OFTEN = 13
_SOON = 128
_SELDOM = 37
_LATE = 512
_RARELY = 101
"""The first batches are all sampled, then each 13th, of a long fit each 37th, and late in it each 101st: no usual interval
of a loop is a multiple of these."""
_AGAIN = 4
"""Batches in a row that are sampled where a long fit has become twice as long, from batch `2 * _SOON` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether a batch is sampled."""

    is_in_stretch: bool  # all batches around it are, too
    is_looked_at: bool
    next: int  # number of the batch that is the next to be chosen: those between are not sampled


class LookSchedule:
    """Chooses the sampled batches. It is called for each in turn, except those skipped by the previous choice."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, batches: int) -> None:
        """Begin with a fit after so many begun batches."""
        self._all = batches + _ALL  # up to here every batch is sampled
        self._again = 2 * _SOON  # batch at the beginning of a stretch in a long fit

    def look_up_to(self, number: int) -> None:
        """Have all batches up to this one looked at."""
        self._all = max(self._all, number)

    def choose(self, number: int) -> Choice:
        """Return whether a batch that begins is sampled."""
        if number >= self._again:
            self._again *= 2
            self.look_up_to(number + _AGAIN - 1)
        is_in_stretch = number <= self._all
        every = _OFTEN if number <= _SOON else _SELDOM if number <= _LATE else _RARELY
        is_looked_at = is_in_stretch or number % every == 0
        return Choice(
            is_in_stretch=is_in_stretch,
            is_looked_at=is_looked_at,
            next=number + 1 if is_looked_at else number - number % every + every,
        )


_RESERVED = 16384
"""Numbers that the list has room for, after as many zeros, before it has to be copied to a larger place."""
_LOOSE = 8192
"""Numbers that may be in the list before they are packed, which is done only at sampled batches."""
_PAIR = struct.calcsize("=hq")
_KINDS: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
BOUNDARY_CODES = {kind: ~number for number, kind in enumerate(_KINDS)}
"""The numbers of boundaries in the log: below 0, as those of phases are not."""


class Log:
    """Marks and boundaries in their order. `mark(code)` logs the phase that has gone on since the mark before.

    Code that every batch passes adds its entries by itself, several at once, without a call: `add((code, clock()))` is a mark,
    `add((BOUNDARY_CODES[kind], loop))` a boundary. All numbers of one `add` come or none, wherever an interrupt falls.
    An array takes several times as long to take a number as a list, which is packed from time to time. CPython keeps the memory
    of a list that it shortens to no less than half; so its first half is never used, and nothing is copied as it grows.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._loose = [0] * (2 * _RESERVED)  # of a mark its code and time; of a boundary its kind, below 0, and loop
        del self._loose[_RESERVED:]
        self._packed: list[bytes] = []  # entries before those, packed
        self._before = 0  # entries that are packed
        self.add = self._loose.extend
        self.mark: Callable[[int], None] = _marker(self.add, clock)

    def boundary(self, kind: BoundaryKind, loop: int) -> None:
        """Log a boundary."""
        self.add((BOUNDARY_CODES[kind], loop))

    def pack(self) -> None:
        """Pack the entries, if there are many."""
        if len(self._loose) > _RESERVED + _LOOSE:
            numbers = self._loose[_RESERVED:]
            packed, count = _pack(numbers), len(numbers) // 2
            del self._loose[_RESERVED:]  # first: an interrupt here costs some of the log, and leaves the rest in order
            self._packed.append(packed)
            self._before += count

    def __len__(self) -> int:
        """Return the number of entries: marks and boundaries."""
        return self._before + (len(self._loose) - _RESERVED) // 2

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the packed entries have."""
        return sum(map(sys.getsizeof, self._packed))

    def position(self, entries: int) -> LogPosition:
        """Return the place after so many of the first entries."""
        boundaries = sum(1 for _ in self.boundaries(entries))
        return LogPosition(entries - boundaries, boundaries)

    def _columns(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield entries by column: the codes of phases and boundaries, and the times or loops."""
        yield from map(_unpacked, self._packed)
        yield self._loose[_RESERVED::2], self._loose[_RESERVED + 1 :: 2]

    def boundaries(self, most: int | None = None, first: int = 0) -> Iterator[Boundary]:
        """Yield the boundaries, or those among so many of the first entries, from entry `first` on."""
        before = number = 0
        for codes, loops in self._columns():
            for place in [place for place, code in enumerate(codes) if code < 0]:
                entry = before + place
                if entry >= first and (most is None or entry < most):
                    yield Boundary(entry - first - number, _KINDS[~codes[place]], loops[place])
                    number += 1
            before += len(codes)

    def marks(self, start: int, labels: tuple[str, ...], callbacks: Mapping[str, str]) -> PhaseLog:
        """Return the whole log, which began at `start`; `labels` are the phases by their codes."""
        codes, times = array("H"), array("q")
        for column, ends in self._columns():
            codes.extend([code for code in column if code >= 0])
            times.extend([end for code, end in zip(column, ends, strict=True) if code >= 0])
        boundaries = tuple(self.boundaries())
        return PhaseLog(start=start, codes=codes, times=times, labels=labels, boundaries=boundaries, callbacks=callbacks)


def _pack(numbers: Sequence[int]) -> bytes:
    """Return pairs of numbers as bytes, ten for each pair."""
    count = len(numbers) // 2
    return struct.pack(f"={count}h{count}q", *numbers[::2], *numbers[1::2])


def _unpacked(packed: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """Return the two columns of pairs."""
    count = len(packed) // _PAIR
    numbers = struct.unpack(f"={count}h{count}q", packed)
    return numbers[:count], numbers[count:]


def _marker(add: Callable[[tuple[int, int]], None], clock: Callable[[], int]) -> Callable[[int], None]:
    """Return `Log.mark`: a function that looks nothing up."""

    def mark(code: int) -> None:
        add((code, clock()))

    return mark
