"""Notes each collective that Python calls, with its line, root and operation, and messages from rank to rank.

PyTorch's recorder does not keep all of that, and its records are lost with a process that is killed. PyTorch wraps each of
these functions for its own log; the wrapper finds the function in a cell of its closure. Our function is put into that cell:
so it is called whoever has imported the collective, and under whatever name.
"""

from __future__ import annotations

import inspect
import mmap
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import CellType, CodeType, FrameType
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.training.ranks.analysis.facts import CollectiveCall

# --- The last calls of a rank, in a part of its mapped file, where they outlive a killed process and others may read them.
#
# A call is four numbers. Its words, the same for each such call from the same line, are written once, to a table behind
# them.


KEPT = 64  # calls
NUMBERS = 4  # of each call: its own, its position, the entry of its words, and its own once more when it has returned
_SLOTS_SIZE = KEPT * NUMBERS * 8
_ENTRY = struct.Struct("<q?qq16s24s12s32s120s")  # its number, point to point, elements, peer, group, name, dtype, detail, place
TABLE = 1024
"""Entries of the table: of more different calls the words of the first are written over."""

CALLS_SIZE = _SLOTS_SIZE + TABLE * _ENTRY.size
"""Bytes that the calls take, where all of the table is used."""


class CallLog:
    """The last calls of a rank, at a place of a mapped file, which is a multiple of 8."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._map = mapped
        self._table = at + _SLOTS_SIZE
        self._entries = count(1)
        self.slots: memoryview[int] = memoryview(mapped)[at : self._table].cast("q")
        """Of each kept call NUMBERS numbers; the call `number` stands at `number % KEPT`. `CallHook` writes them."""
        self.numbers: count[int] = count(1)
        """The numbers of the calls to come."""
        self.times: dict[int, int] = {}
        """How often the call of each entry has been noted, by the entry's number. `CallHook` counts."""

    def entry(self, call: CollectiveCall, place: bytes) -> int:
        """Write the words of calls of this kind from a line; return the number of the entry."""
        number = next(self._entries)
        texts = call.group.encode(), call.name.encode(), call.dtype.encode(), call.detail.encode(), place
        elements = -1 if call.elements is None else call.elements
        peer = -1 if call.peer is None else call.peer
        _ENTRY.pack_into(self._map, self._table + number % TABLE * _ENTRY.size, number, call.is_p2p, elements, peer, *texts)
        return number

    @property
    def count(self) -> int:
        """How many calls have been noted ever."""
        return max(self.slots[::NUMBERS])

    def waits(self) -> bool:
        """Say whether the last call has not returned."""
        return max(self.slots[::NUMBERS]) > max(self.slots[3::NUMBERS])

    def read(self) -> tuple[CollectiveCall, ...]:
        """Return the last calls, in their order."""
        slots = self.slots.tolist()
        calls = sorted(slots[at : at + NUMBERS] for at in range(0, len(slots), NUMBERS) if slots[at])
        read = (self._call(position, entry, returned == number) for number, position, entry, returned in calls)
        return tuple(call for call in read if call is not None)

    def since(self, before: dict[int, int]) -> list[tuple[CollectiveCall, int]]:
        """Return the kinds of calls that were noted since `times` was as `before`, each with their number."""
        added = {entry: times - before.get(entry, 0) for entry, times in self.times.items()}
        calls = ((self._call(0, entry, is_done=True), times) for entry, times in added.items() if times)
        return [(call, times) for call, times in calls if call is not None]

    def _call(self, position: int, entry: int, is_done: bool) -> CollectiveCall | None:
        """Return a call with its words, or None if others were written over them."""
        number, is_p2p, elements, peer, *texts = _ENTRY.unpack_from(self._map, self._table + entry % TABLE * _ENTRY.size)
        if number != entry:
            return None
        group, name, dtype, detail, place = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
        return CollectiveCall(
            group=group,
            position=position,
            name=name,
            elements=None if elements < 0 else elements,
            dtype=dtype,
            detail=detail,
            peer=None if peer < 0 else peer,
            place=place,
            is_done=is_done,
            is_p2p=is_p2p,
        )

    def close(self) -> None:
        """Let go of the file."""
        self.slots.release()


_TENSORS: Mapping[str, str] = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "gather": "tensor", "scatter": "tensor",
    "all_gather": "tensor", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter": "output", "reduce_scatter_tensor": "output", "reduce_scatter_single": "output",
    "all_to_all": "", "all_to_all_single": "", "barrier": "", "send": "tensor", "recv": "tensor",
}  # fmt: skip
"""Functions, each with the argument whose size is the same on all ranks."""
_ROOTS = ("src", "dst", "group_src", "group_dst")
_MESSAGES = frozenset({"send", "recv"})
_CALLER = 3
"""Frames from a function that a hooked one calls, over it and PyTorch's wrapper, to the wrapper's caller."""


class CallHook:
    """Notes the calls of torch.distributed's functions in a log, from `install` to `remove`."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._cells: list[tuple[CellType, Any]] = []
        self._messages: dict[str, int] = {}  # of each group: how many calls from rank to rank its sequence has counted

    def install(self) -> None:
        """Put the hook into every function that PyTorch wraps."""
        from torch.distributed import distributed_c10d as module

        words = _Words(self._log)
        for name in _TENSORS:
            wrapper = vars(module).get(name)
            names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
            if "func" in names:
                cell: CellType = wrapper.__closure__[names.index("func")]
                function = cell.cell_contents
                call = _Call(name, function)
                hooked = (self._message if name in _MESSAGES else self._collective)(function, call, words)
                cell.cell_contents = hooked
                self._cells.append((cell, (hooked, function)))

    def remove(self) -> None:
        """Take the hook out where it is still ours."""
        for cell, (hooked, function) in self._cells:
            if cell.cell_contents is hooked:
                cell.cell_contents = function
        self._cells.clear()

    def _collective(self, function: Callable[..., Any], call: _Call, words: _Words) -> Callable[..., Any]:
        """Return a function whose calls are noted.

        One call in each step finds the processor's caches cold: code of 3 µs in a loop takes 40 there. So the work for the
        usual call is in one function, and calls few others.
        """
        name, is_simple, arguments, world = call.name, call.is_simple, call.arguments, call.world
        codes, entries, user_frame, entry_of = words.codes, words.entries, words.user_frame, words.entry
        slots, numbers, messages, getframe = self._log.slots, self._log.numbers, self._messages, sys._getframe
        times = self._log.times

        def logged(*args: Any, **kwargs: Any) -> Any:
            number = 0
            try:
                if is_simple and len(args) == 1 and not kwargs:
                    (tensor,) = args
                    group, elements, dtype, details = world.default_pg, tensor.numel(), tensor.dtype, None
                else:
                    group, elements, dtype, details = arguments(args, kwargs)
                frame = getframe(_CALLER - 1)
                if id(frame.f_code) not in codes:
                    frame = user_frame(frame)
                key = name, id(frame.f_code), frame.f_lasti, id(group), elements, dtype, details
                entry = entries.get(key) or entry_of(key, call, frame, group)
                position = group._get_sequence_number_for_group() + 1
                if messages:
                    position -= messages.get(group.group_name, 0)
                number = next(numbers)
                at = number % KEPT * NUMBERS
                slots[at + 1] = position
                slots[at + 2] = entry
                slots[at] = number
                times[entry] = times.get(entry, 0) + 1
            except Exception:  # noqa: BLE001, S110 - a mistake of ours is no error of the user's
                pass
            result = function(*args, **kwargs)
            if number and slots[at] == number:
                slots[at + 3] = number
            return result

        logged.__name__ = function.__name__
        return logged

    def _message(self, function: Callable[..., Any], call: _Call, words: _Words) -> Callable[..., Any]:
        """Return a function whose calls gloo counts among the collectives of its group, and NCCL does not."""
        logged, messages = self._collective(function, call, words), self._messages

        def counted(*args: Any, **kwargs: Any) -> Any:
            label, before = call.sequence(args, kwargs)
            result = logged(*args, **kwargs)
            messages[label] = messages.get(label, 0) + call.sequence(args, kwargs)[1] - before
            return result

        counted.__name__ = function.__name__
        return counted


class _Call:
    """A function of torch.distributed: where its arguments stand."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        from torch import Tensor
        from torch.distributed import distributed_c10d as module

        parameters = {parameter: at for at, parameter in enumerate(inspect.signature(function).parameters)}
        self.name, self.world, self._kind = name, module._world, Tensor
        self._tensor, self._group = ((each, parameters.get(each, len(parameters))) for each in (_TENSORS[name], "group"))
        self._details = tuple((each, parameters[each]) for each in (*_ROOTS, "op") if each in parameters)
        self.is_simple = self._tensor[1] == 0
        """Whether the tensor is the first argument, so that a call with one argument is known by it."""

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int | None, object, object]:
        """Return the group of a call, the elements and the dtype of its tensor, and its other details that must agree."""
        name, at = self._tensor
        tensor = args[at] if at < len(args) else kwargs.get(name)
        elements, dtype = (tensor.numel(), tensor.dtype) if isinstance(tensor, self._kind) else (None, "")
        details = tuple(args[at] if at < len(args) else kwargs.get(each) for each, at in self._details)
        return self._group_of(args, kwargs), elements, dtype, details

    def sequence(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, int]:
        """Return the name of a call's group, and how many calls its sequence has counted; ("", 0) where it tells none."""
        try:
            group = self._group_of(args, kwargs)
            return group.group_name, group._get_sequence_number_for_group()
        except Exception:  # noqa: BLE001 - the user's call says what is wrong with it
            return "", 0

    def detail(self, details: tuple[Any, ...] | None) -> tuple[str, int | None]:
        """Return in words the other details that must agree of a call: root or operation, or a message's peer and number."""
        values = (None,) * len(self._details) if details is None else details
        given = {each: value for (each, _), value in zip(self._details, values, strict=True) if value is not None}
        word, rank = next(((each, given[each]) for each in _ROOTS if type(given.get(each)) is int), ("", None))
        if self.name in _MESSAGES:
            return f"{'to' if self.name == 'send' else 'from'} rank {'' if rank is None else rank}", rank
        return f"{word}={rank}" if word else _operation(given), None

    def _group_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name, at = self._group
        return (args[at] if at < len(args) else kwargs.get(name)) or self.world.default_pg


class _Words:
    """The words of calls, in a log, written once for each kind of call from each line."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._sites = Sites()
        self._groups: dict[int, weakref.ref[Any]] = {}
        self._others: dict[int, CodeType] = {}
        self._above: dict[tuple[int, int], dict[int, set[tuple[int, int]]]] = {}
        """By the place of a library's call: how many frames above it the user's lines stood, and which these were."""
        self.codes: dict[int, CodeType] = {}
        """The user's code objects, by their ids, which are theirs as long as they are held here."""
        self.entries: dict[tuple[Any, ...], int] = {}
        """Numbers of entries of the log, by the facts of a call; no two of them have one place in its table."""

    def user_frame(self, caller: FrameType) -> FrameType:
        """Return the innermost frame that is the user's; the outermost of all where none is.

        Called by a hooked function. A library such as FSDP makes its collectives some twenty frames below the user's line, and
        Python makes an object of each frame that is asked for. So only those frames are asked for at which a call from the
        same place had a user's line before, the nearest first, and of these only a line that was one there is believed.
        """
        place = id(caller.f_code), caller.f_lasti
        above = self._above.get(place, {})
        for depth, lines in above.items():
            try:
                frame = sys._getframe(_CALLER + depth)
            except ValueError:  # the stack is not as deep
                break
            if id(frame.f_code) in self._others:
                continue
            if (id(frame.f_code), frame.f_lasti) in lines:
                return frame
            break
        frame, depth = self._walk(caller)
        if id(frame.f_code) in self.codes:
            lines = above.get(depth, set()) | {(id(frame.f_code), frame.f_lasti)}
            self._above[place] = dict(sorted({**above, depth: lines}.items()))
        return frame

    def _walk(self, frame: FrameType) -> tuple[FrameType, int]:
        """Return the innermost frame from this one up that is the user's, else the outermost, and how far up it is."""
        depth = 0
        while True:
            code = frame.f_code
            if id(code) not in self.codes and id(code) not in self._others:
                kind = self.codes if self._sites.is_users(code.co_filename) else self._others
                kind[id(code)] = code
            if id(code) in self.codes or frame.f_back is None:
                return frame, depth
            frame, depth = frame.f_back, depth + 1

    def entry(self, key: tuple[Any, ...], call: _Call, frame: FrameType, group: Any) -> int:
        """Write the words of a call; return the number of their entry."""
        _, code, _, group_id, elements, dtype, details = key
        if len(self.entries) >= TABLE:
            self.entries.clear()
        if group_id not in self._groups:
            self._groups[group_id] = weakref.ref(group, self._forget)
        detail, peer = call.detail(details)
        words = CollectiveCall(
            group=group.group_name,
            position=0,
            name=call.name,
            elements=elements,
            dtype=str(dtype).removeprefix("torch."),
            detail=detail,
            peer=peer,
            is_done=False,
            is_p2p=call.name in _MESSAGES,
        )
        number = self.entries[key] = self._log.entry(words, self._place(frame) if code in self.codes else b"")
        return number

    def _place(self, frame: FrameType) -> bytes:
        """Return a line in words."""
        code = frame.f_code
        frames: Sequence[Mapping[str, Any]] = ({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name},)
        return self._sites.of(frames).encode()[:120]

    def _forget(self, _group: object) -> None:
        """Forget the calls of a group that is gone: another may get its id."""
        self._groups.clear()
        self.entries.clear()


def _operation(given: Mapping[str, Any]) -> str:
    """Return the operation of a reduction in words; empty where the call has none."""
    if "op" not in given:
        return ""
    op = given["op"]
    return f"op={getattr(op, 'name', None) or str(op).rpartition('.')[2].rstrip('>')}".lower()[:32]
