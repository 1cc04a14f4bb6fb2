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
from contextlib import suppress
from types import CellType, CodeType, FrameType
from typing import Any

from nbguard.ranks.analysis.facts import CollectiveCall
from nbguard.ranks.call_log import CallLog
from nbguard.scan.devices.allocation_sites import Sites

_TENSORS: Mapping[str, str] = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "gather": "tensor", "scatter": "tensor",
    "all_gather": "tensor", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter": "output", "reduce_scatter_tensor": "output", "reduce_scatter_single": "output",
    "all_to_all": "", "all_to_all_single": "", "barrier": "", "send": "tensor", "recv": "tensor",
}  # fmt: skip
"""Functions, each with the argument whose size is the same on all ranks."""
_ROOTS = ("src", "dst", "group_src", "group_dst")


class CallHook:
    """Notes the calls of torch.distributed's functions in a log, from `install` to `remove`."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._cells: list[tuple[CellType, Any]] = []
        self._inside = threading.local()
        self._places = _Places()
        self._messages: dict[str, int] = {}  # of each group: how many calls from rank to rank its sequence has counted

    def install(self) -> None:
        """Put the hook into every function that PyTorch wraps."""
        from torch.distributed import distributed_c10d as module

        for name in _TENSORS:
            wrapper = vars(module).get(name)
            names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
            if "func" in names:
                cell: CellType = wrapper.__closure__[names.index("func")]
                function = cell.cell_contents
                hooked = self._hooked(name, function)
                cell.cell_contents = hooked
                self._cells.append((cell, (hooked, function)))

    def remove(self) -> None:
        """Take the hook out where it is still ours."""
        for cell, (hooked, function) in self._cells:
            if cell.cell_contents is hooked:
                cell.cell_contents = function
        self._cells.clear()

    def _hooked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inside, begin, end = self._inside, self._begin, self._end
        arguments = tuple(inspect.signature(function).parameters)

        def logged(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "is_so", False):  # called by another of them
                return function(*args, **kwargs)
            inside.is_so = True
            try:
                noted = begin(name, dict(zip(arguments, args, strict=False)) | kwargs)
                result = function(*args, **kwargs)
                end(noted)
                return result
            finally:
                inside.is_so = False

        return logged

    def _begin(self, name: str, given: Mapping[str, Any]) -> tuple[int, Any, int] | None:
        with suppress(Exception):  # a mistake of ours is no error of the user's call
            return self._note(name, given)
        return None

    def _note(self, name: str, given: Mapping[str, Any]) -> tuple[int, Any, int]:
        from torch import Tensor
        from torch.distributed import group as groups

        group = given.get("group") or groups.WORLD
        tensor = given.get(_TENSORS[name])
        is_message = name in ("send", "recv")
        elements, dtype = (tensor.numel(), str(tensor.dtype)) if isinstance(tensor, Tensor) else (None, "")
        label, sequence = group.group_name, group._get_sequence_number_for_group()
        call = CollectiveCall(
            group=label,
            position=sequence + 1 - self._messages.get(label, 0),
            name=name,
            elements=elements,
            dtype=dtype.removeprefix("torch."),
            detail=_detail(name, given),
            is_done=False,
            is_p2p=is_message,
        )
        number = self._log.begin(call, self._places.of(sys._getframe(3)))
        return number, group if is_message else None, sequence

    def _end(self, noted: tuple[int, Any, int] | None) -> None:
        if noted is not None:
            with suppress(Exception):
                self._returned(*noted)

    def _returned(self, number: int, group: Any, before: int) -> None:
        self._log.end(number)
        if group is not None:  # gloo counts it among the collectives, NCCL does not
            counted = group._get_sequence_number_for_group() - before
            self._messages[group.group_name] = self._messages.get(group.group_name, 0) + counted


def _detail(name: str, given: Mapping[str, Any]) -> str:
    """Return what else must agree of a call: its root or its operation; of a message its peer."""
    root = next((f"{word}={given[word]}" for word in _ROOTS if type(given.get(word)) is int), "")
    if name in ("send", "recv"):
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
        self._known: dict[tuple[CodeType, int], bytes] = {}

    def of(self, frame: FrameType | None) -> bytes:
        """Return the innermost line that is not a library's."""
        users = self._users
        while frame is not None:
            code = frame.f_code
            is_users = users.get(code)
            if is_users is None:
                is_users = users[code] = self._sites.is_users(code.co_filename)
            if is_users:
                return self._written(code, frame.f_lineno)
            frame = frame.f_back
        return b""

    def _written(self, code: CodeType, line: int) -> bytes:
        written = self._known.get((code, line))
        if written is None:
            frames: Sequence[Mapping[str, Any]] = ({"filename": code.co_filename, "line": line, "name": code.co_name},)
            written = self._known[code, line] = self._sites.of(frames).encode()[:120]
        return written
