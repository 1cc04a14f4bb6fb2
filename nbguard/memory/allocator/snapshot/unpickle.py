"""An unpickler of plain data and nothing else, which looks up no global, makes no object and runs no code.

Python's own unpickler can be kept from looking up globals, but not from filling memory (a memo index of four thousand
million) or hanging (keys made to collide). This one knows the opcodes of plain data only, and every container that it
makes costs bytes of the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from nbguard.errors import SnapshotError
from nbguard.plain_data import DEEPEST, NESTED, take_apart

Progress = Callable[[int, int], None]
"""Called now and then with (bytes done, bytes in all)."""

_STEP = 20_000
"""Opcodes between two reports of progress."""

_BYTES_PER_OBJECT = 5
"""Fewer bytes of the file than this for each object are no content, and would fill many times the size of the file."""

_LONGEST_NUMBER = 16
"""Bytes of an integer; no address or size has more than nine."""

_LONGEST_RUN = 200
"""References to the memo that are read at once."""

_CALLS = b"cioRb\x81\x92\x93PQ\x82\x83\x84"
"""Opcodes that look up a global, make an object or call something."""

_STRING = {str}
_REFERENCES = re.compile(rb"(?:j[\s\S]{4}){4,}")
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q", ">d"))


DAMAGED = "not a readable snapshot: the pickle ends too early or is damaged."


class UnreadablePickle(Exception):  # noqa: N818
    """The reason why a pickle is not read."""


class _End(Exception):  # noqa: N818
    """The end of the pickle is reached."""


def unpickle(data: bytes, progress: Progress | None = None) -> Any:
    """Return the object in a pickle of dicts with string keys, lists, tuples, strings, numbers, True, False and None.

    By references to one another its values may be nested at any depth: `plain_data.is_nested` says whether they are.

    Raises:
        SnapshotError: the pickle has other objects, would call something, ends too early, or is none at all.
    """
    reader = _Reader(data)
    try:
        return reader.read(progress or (lambda _done, _total: None))
    except UnreadablePickle as bad:
        why = unreadable(bad)
    except (IndexError, struct.error):
        why = DAMAGED
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        why = "not a readable snapshot: the pickle is damaged."
    take_apart(reader.memo, reader.stack, reader.below)
    raise SnapshotError(why)


def unpickle_before(data: bytes, key: str) -> dict[str, Any] | None:
    """Return the entries of a pickled dict before one key, from the first bytes of the pickle.

    None where the bytes end before that key, or are no pickle that `unpickle` reads.
    """
    reader, position = _Reader(data), 0
    try:
        while True:
            position = reader.some(position)
            reader.weigh()
            entries = reader.below[1] if len(reader.below) > 1 else reader.stack
            if key in entries[::2]:
                before: dict[str, Any] = {}
                reader.fill(before, entries[: 2 * entries[::2].index(key)])
                return before
    except (_End, UnreadablePickle, struct.error, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def unreadable(why: UnreadablePickle) -> str:
    """Return the message of the error for a pickle that is not read."""
    return f"not a readable snapshot: {why}."


def asks_for(wanted: str) -> UnreadablePickle:
    """Return the reason why a pickle is not read that wants something looked up or made."""
    return UnreadablePickle(f"it asks for {wanted!r}, and a snapshot holds plain data only; nothing of it was run")


class _Reader:
    """The stack machine. A handler is named after its opcode, gets the position behind it, and returns the next opcode's."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []  # objects since the last mark
        self.below: list[list[Any]] = []  # the stacks before each mark
        self.memo: dict[int, Any] = {}  # objects that later opcodes refer to, by number
        self.made = 0  # containers made so far

    def read(self, progress: Progress) -> Any:
        position = 0
        try:
            while True:
                progress(position, len(self.data))
                position = self.some(position)
                self.weigh()
        except _End:
            progress(len(self.data), len(self.data))
            return self.stack.pop()

    def weigh(self) -> None:
        """Refuse a pickle with almost no content, as it would fill many times its own size of memory."""
        if max(self.made, len(self.memo), len(self.stack)) > len(self.data) // _BYTES_PER_OBJECT + _STEP:
            raise UnreadablePickle("it is made of empty containers")

    def some(self, position: int) -> int:
        """Read some opcodes, the five most frequent of a snapshot in place: that halves the time."""
        data, table, memo, number = self.data, _TABLE, self.memo, int.from_bytes
        stack = self.stack
        for _ in range(_STEP):
            opcode = data[position]
            if opcode == 0x68:  # get
                stack.append(memo[data[position + 1]])
                position += 2
            elif opcode == 0x94:  # memoize
                memo[len(memo)] = stack[-1]
                position += 1
            elif opcode == 0x4B:  # binint1
                stack.append(data[position + 1])
                position += 2
            elif opcode == 0x8A and (size := data[position + 1]) <= _LONGEST_NUMBER:  # long1; damage shows behind it
                stack.append(number(data[position + 2 : position + 2 + size], "little", signed=True))
                position += 2 + size
            elif opcode == 0x28 and len(self.below) < DEEPEST:  # mark
                self.below.append(stack)
                stack = self.stack = []
                position += 1
            else:
                position = table[opcode](self, position + 1)
                stack = self.stack
        return position

    # --- opcodes that no snapshot needs -----------------------------------------------------------------------------------

    def unknown(self, position: int) -> int:
        raise UnreadablePickle(f"byte {position - 1} is not an opcode of a pickle of plain data")

    def call(self, position: int) -> int:
        opcode = self.data[position - 1]
        asked = self.data[position : position + 80].split(b"\n")[:2] if opcode == 0x63 else self.stack[-2:]
        words = [word.decode("ascii", "replace") if isinstance(word, bytes) else word for word in asked]
        name = ".".join(word[:60] for word in words if isinstance(word, str)) if opcode in (0x63, 0x93) else "an object"
        raise asks_for(name or "a global")

    # --- numbers, texts, and objects read before --------------------------------------------------------------------------

    def none(self, position: int) -> int:
        self.stack.append(None)
        return position

    def true(self, position: int) -> int:
        self.stack.append(True)
        return position

    def false(self, position: int) -> int:
        self.stack.append(False)
        return position

    def binint1(self, position: int) -> int:
        self.stack.append(self.data[position])
        return position + 1

    def binint2(self, position: int) -> int:
        self.stack.append(_U16.unpack_from(self.data, position)[0])
        return position + 2

    def binint(self, position: int) -> int:
        self.stack.append(_I32.unpack_from(self.data, position)[0])
        return position + 4

    def long1(self, position: int) -> int:
        end = position + 1 + self.data[position]
        if end - position > _LONGEST_NUMBER + 1:
            raise UnreadablePickle(f"a number of {end - position - 1} bytes")
        self.stack.append(int.from_bytes(self.piece(position + 1, end), "little", signed=True))
        return end

    def int_text(self, position: int) -> int:
        end = self.line(position)
        text = self.data[position:end].rstrip(b"L")
        if len(text) > 2 * _LONGEST_NUMBER:
            raise UnreadablePickle(f"a number of {len(text)} digits")
        self.stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text))
        return end + 1

    long_text = int_text

    def binfloat(self, position: int) -> int:
        self.stack.append(_F64.unpack_from(self.data, position)[0])
        return position + 8

    def float_text(self, position: int) -> int:
        end = self.line(position)
        self.stack.append(float(self.data[position : min(end, position + 64)]))
        return end + 1

    def short_text(self, position: int) -> int:
        end = position + 1 + self.data[position]
        self.stack.append(self.piece(position + 1, end).decode("utf-8", "surrogatepass"))
        return end

    def text(self, position: int) -> int:
        (size,) = _U32.unpack_from(self.data, position)
        end: int = position + 4 + size
        self.stack.append(self.piece(position + 4, end).decode("utf-8", "surrogatepass"))
        return end

    def text8(self, position: int) -> int:
        (size,) = _U64.unpack_from(self.data, position)
        end: int = position + 8 + size
        self.stack.append(self.piece(position + 8, end).decode("utf-8", "surrogatepass"))
        return end

    def unicode_line(self, position: int) -> int:
        end = self.line(position)
        self.stack.append(self.data[position:end].decode("raw-unicode-escape"))
        return end + 1

    def memoize(self, position: int) -> int:
        self.memo[len(self.memo)] = self.stack[-1]
        return position

    def put(self, position: int) -> int:
        self.memo[self.data[position]] = self.stack[-1]
        return position + 1

    def long_put(self, position: int) -> int:
        self.memo[_U32.unpack_from(self.data, position)[0]] = self.stack[-1]
        return position + 4

    def put_text(self, position: int) -> int:
        end = self.line(position)
        self.memo[int(self.data[position : min(end, position + 12)])] = self.stack[-1]
        return end + 1

    def get(self, position: int) -> int:
        self.stack.append(self.memo[self.data[position]])
        return position + 1

    def long_get(self, position: int) -> int:
        run = _REFERENCES.match(self.data, position - 1)
        if run is None:
            self.stack.append(self.memo[_U32.unpack_from(self.data, position)[0]])
            return position + 4
        count = min(len(run[0]) // 5, _LONGEST_RUN)
        self.stack += map(self.memo.__getitem__, struct.unpack_from("<" + "xI" * count, run[0]))
        return position - 1 + 5 * count

    def get_text(self, position: int) -> int:
        end = self.line(position)
        self.stack.append(self.memo[int(self.data[position : min(end, position + 12)])])
        return end + 1

    # --- bytes of the file ------------------------------------------------------------------------------------------------

    def piece(self, start: int, end: int) -> bytes:
        if end > len(self.data):
            raise UnreadablePickle("it ends too early")
        return self.data[start:end]

    def line(self, start: int) -> int:
        end = self.data.find(b"\n", start)
        if end < 0:
            raise UnreadablePickle("it ends too early")
        return end

    # --- containers -------------------------------------------------------------------------------------------------------

    def new_dict(self, position: int) -> int:
        self.made += 1
        self.stack.append({})
        return position

    def new_list(self, position: int) -> int:
        self.made += 1
        self.stack.append([])
        return position

    def new_tuple(self, position: int) -> int:
        self.stack.append(())
        return position

    def mark(self, position: int) -> int:
        if len(self.below) >= DEEPEST:
            raise UnreadablePickle(NESTED)
        self.below.append(self.stack)
        self.stack = []
        return position

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def pop_mark(self, position: int) -> int:
        self.since_mark()
        return position

    def pop(self, position: int) -> int:
        self.stack.pop()
        return position

    def dup(self, position: int) -> int:
        self.stack.append(self.stack[-1])
        return position

    def append(self, position: int) -> int:
        item = self.stack.pop()
        self.top(list).append(item)
        return position

    def appends(self, position: int) -> int:
        items = self.since_mark()
        self.top(list).extend(items)
        return position

    def setitem(self, position: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill(self.top(dict), [key, value])
        return position

    def setitems(self, position: int) -> int:
        items = self.since_mark()
        self.fill(self.top(dict), items)
        return position

    def dict_of_marked(self, position: int) -> int:
        items = self.since_mark()
        self.stack.append({})
        self.fill(self.stack[-1], items)
        return position

    def list_of_marked(self, position: int) -> int:
        items = self.since_mark()
        self.stack.append(items)
        return position

    def tuple_of_marked(self, position: int) -> int:
        items = self.since_mark()
        self.made += 1
        self.stack.append(tuple(items))
        return position

    def tuple1(self, position: int) -> int:
        self.made += 1
        self.stack[-1:] = [(self.stack[-1],)]
        return position

    def tuple2(self, position: int) -> int:
        self.made += 1
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]
        return position

    def tuple3(self, position: int) -> int:
        self.made += 1
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]
        return position

    def fill(self, target: dict[str, Any], items: list[Any]) -> None:
        keys = items[::2]
        # Any other key could be made to collide with the rest, or nested so deep that hashing it overflows.
        if len(items) % 2 or not {*map(type, keys)} <= _STRING:
            raise UnreadablePickle("a dict has a key that is not a string")
        target.update(zip(keys, items[1::2], strict=True))

    def top(self, kind: type) -> Any:
        container = self.stack[-1]
        if type(container) is not kind:
            raise UnreadablePickle(f"something is put into a {type(container).__name__} that is not a {kind.__name__}")
        return container

    # --- the frame of the pickle ------------------------------------------------------------------------------------------

    def proto(self, position: int) -> int:
        if self.data[position] > 5:
            raise UnreadablePickle(f"it is of pickle protocol {self.data[position]}, and 5 is the newest that is known")
        return position + 1

    def frame(self, position: int) -> int:
        return position + 8

    def stop(self, _position: int) -> int:
        raise _End


_NAMES = """
none=4E true=88 false=89 binint1=4B binint2=4D binint=4A long1=8A int_text=49 long_text=4C binfloat=47 float_text=46
short_text=8C text=58 text8=8D unicode_line=56 new_dict=7D new_list=5D new_tuple=29 mark=28 pop_mark=31 pop=30 dup=32
append=61 appends=65 setitem=73 setitems=75 dict_of_marked=64 list_of_marked=6C tuple_of_marked=74 tuple1=85 tuple2=86
tuple3=87 memoize=94 put=71 long_put=72 put_text=70 get=68 long_get=6A get_text=67 proto=80 frame=95 stop=2E
"""
_OPCODES = {name: int(code, 16) for name, _, code in (pair.partition("=") for pair in _NAMES.split())}

_TABLE: list[Callable[[_Reader, int], int]] = [_Reader.unknown] * 256
"""The handler of each opcode."""
for _opcode in _CALLS:
    _TABLE[_opcode] = _Reader.call
for _name, _opcode in _OPCODES.items():
    _TABLE[_opcode] = getattr(_Reader, _name)
