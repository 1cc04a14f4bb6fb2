"""Notes each collective that Python calls, with its line, root and operation, and messages from rank to rank.

PyTorch's recorder does not keep all of that, and what it keeps is lost with a process that is killed. PyTorch wraps each of
these functions for its own log; the wrapper finds the function in a cell of its closure. Our function is put into that cell:
so it is called whoever has imported the collective, and under whatever name.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType, FrameType
from typing import Any

from nbguard.ranks.analysis.facts import CollectiveCall
from nbguard.ranks.call_log import CallLog, packed
from nbguard.scan.devices.allocation_sites import Sites

_TENSORS: Mapping[str, str] = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "gather": "tensor", "scatter": "tensor",
    "all_gather": "tensor", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter": "output", "reduce_scatter_tensor": "output", "reduce_scatter_single": "output",
    "all_to_all": "", "all_to_all_single": "", "barrier": "", "send": "tensor", "recv": "tensor",
}  # fmt: skip
"""Functions, each with the argument whose size is the same on all ranks."""
_ROOTS = ("src", "dst", "group_src", "group_dst")
_MESSAGES = frozenset({"send", "recv"})
_KEPT = 4096
"""Different calls whose words are kept: a program that calls with ever new sizes makes them anew."""


class CallHook:
    """Notes the calls of torch.distributed's functions in a log, from `install` to `remove`."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._cells: list[tuple[CellType, Any]] = []
        self._inside = threading.local()
        self._messages: dict[str, int] = {}  # of each group: how many calls from rank to rank its sequence has counted

    def install(self) -> None:
        """Put the hook into every function that PyTorch wraps."""
        from torch.distributed import distributed_c10d as module

        places = _Places()
        for name in _TENSORS:
            wrapper = vars(module).get(name)
            names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
            if "func" in names:
                cell: CellType = wrapper.__closure__[names.index("func")]
                function = cell.cell_contents
                note = _Note(name, function, self._log, places, self._messages)
                hooked = (self._message if name in _MESSAGES else self._collective)(function, note)
                cell.cell_contents = hooked
                self._cells.append((cell, (hooked, function)))

    def remove(self) -> None:
        """Take the hook out where it is still ours."""
        for cell, (hooked, function) in self._cells:
            if cell.cell_contents is hooked:
                cell.cell_contents = function
        self._cells.clear()

    def _collective(self, function: Callable[..., Any], note: _Note) -> Callable[..., Any]:
        inside, begin, end = self._inside, note.begin, self._log.end

        def logged(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "is_so", False):  # called by another of them
                return function(*args, **kwargs)
            inside.is_so = True
            try:
                number = begin(args, kwargs)
                result = function(*args, **kwargs)
                end(number)
                return result
            finally:
                inside.is_so = False

        logged.__name__ = function.__name__
        return logged

    def _message(self, function: Callable[..., Any], note: _Note) -> Callable[..., Any]:
        """Return a function whose calls gloo counts among the collectives of its group, and NCCL does not."""
        logged, messages = self._collective(function, note), self._messages

        def counted(*args: Any, **kwargs: Any) -> Any:
            label, before = note.sequence(args, kwargs)
            result = logged(*args, **kwargs)
            messages[label] = messages.get(label, 0) + note.sequence(args, kwargs)[1] - before
            return result

        counted.__name__ = function.__name__
        return counted


class _Note:
    """Notes the calls of one function. Its words are made once for each kind of call from each line."""

    def __init__(
        self, name: str, function: Callable[..., Any], log: CallLog, places: _Places, messages: Mapping[str, int]
    ) -> None:
        from torch import Tensor
        from torch.distributed import GroupMember

        parameters = {parameter: at for at, parameter in enumerate(inspect.signature(function).parameters)}
        self._name, self._log, self._places, self._messages = name, log, places, messages
        self._default, self._kind = GroupMember, Tensor
        self._tensor, self._group = ((each, parameters.get(each, len(parameters))) for each in (_TENSORS[name], "group"))
        self._details = tuple((each, parameters[each]) for each in (*_ROOTS, "op") if each in parameters)
        self._words: dict[tuple[object, ...], bytes] = {}

    def group(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the group of a call."""
        name, at = self._group
        return (args[at] if at < len(args) else kwargs.get(name)) or self._default.WORLD

    def sequence(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, int]:
        """Return the name of a call's group, and how many calls its sequence has counted; ("", 0) where it tells none."""
        try:
            group = self.group(args, kwargs)
            return group.group_name, group._get_sequence_number_for_group()
        except Exception:  # noqa: BLE001 - the user's call says what is wrong with it
            return "", 0

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Note a call that begins; return its number, 0 where that failed: a mistake of ours is no error of the user's."""
        try:
            group = self.group(args, kwargs)
            name, at = self._tensor
            tensor = args[at] if at < len(args) else kwargs.get(name)
            label = group.group_name
            shape = (tensor.numel(), tensor.dtype) if isinstance(tensor, self._kind) else (None, "")
            details = [args[at] if at < len(args) else kwargs.get(each) for each, at in self._details]
            key = (label, self._places.of(sys._getframe(2)), *shape, *details)
            words = self._words.get(key)
            if words is None:
                words = self._written(key)
            return self._log.begin(group._get_sequence_number_for_group() + 1 - self._messages.get(label, 0), words)
        except Exception:  # noqa: BLE001
            return 0

    def _written(self, key: tuple[Any, ...]) -> bytes:
        """Return the words of a call, and keep them."""
        label, place, elements, dtype, *details = key
        given = {each: value for (each, _), value in zip(self._details, details, strict=True) if value is not None}
        call = CollectiveCall(
            group=label,
            position=0,
            name=self._name,
            elements=elements,
            dtype=str(dtype).removeprefix("torch."),
            detail=_detail(self._name, given),
            is_done=False,
            is_p2p=self._name in _MESSAGES,
        )
        if len(self._words) >= _KEPT:
            self._words.clear()
        words = self._words[key] = packed(call, place)
        return words


def _detail(name: str, given: Mapping[str, Any]) -> str:
    """Return what else must agree of a call: its root or its operation; of a message its peer."""
    root = next((f"{word}={given[word]}" for word in _ROOTS if type(given.get(word)) is int), "")
    if name in _MESSAGES:
        return f"{'to' if name == 'send' else 'from'} rank {root.rpartition('=')[2]}"
    if root or "op" not in given:
        return root
    op = given["op"]
    return f"op={getattr(op, 'name', None) or str(op).rpartition('.')[2].rstrip('>')}".lower()[:32]


class _Places:
    """Writes the user's line of a live stack, each line of code once."""

    def __init__(self) -> None:
        self._sites = Sites()
        self._users: dict[CodeType, bool] = {}
        self._known: dict[tuple[CodeType, int], bytes] = {}  # by a line's place in its byte code

    def of(self, frame: FrameType | None) -> bytes:
        """Return the innermost line that is not a library's."""
        users = self._users
        while frame is not None:
            code = frame.f_code
            is_users = users.get(code)
            if is_users is None:
                is_users = users[code] = self._sites.is_users(code.co_filename)
            if is_users:
                return self._known.get((code, frame.f_lasti)) or self._written(code, frame)
            frame = frame.f_back
        return b""

    def _written(self, code: CodeType, frame: FrameType) -> bytes:
        frames: Sequence[Mapping[str, Any]] = ({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name},)
        written = self._known[code, frame.f_lasti] = self._sites.of(frames).encode()[:120]
        return written
