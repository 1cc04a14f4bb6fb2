"""The opcodes of a pickle for numbers, texts and what was read before; the position that each gets is behind its opcode."""

# ruff: noqa: D102  (a method is named after its opcode, and does what the pickle documentation says)
from __future__ import annotations

import re
import struct
from typing import Any

LONGEST_NUMBER = 16
"""Bytes of an integer; no address or size has more than nine."""

_LONGEST_RUN = 200
_GETS = re.compile(rb"(?:j[\s\S]{4}){4,}")
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q", ">d"))


class Bad(Exception):  # noqa: N818
    """What is wrong with a pickle."""


class Atoms:
    """Reads atoms from `data`, and what stands in the `memo`, onto the `stack`."""

    data: bytes
    stack: list[Any]
    memo: dict[int, Any]

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
        if end - position > LONGEST_NUMBER + 1:
            raise Bad(f"a number of {end - position - 1} bytes")
        self.stack.append(int.from_bytes(self.piece(position + 1, end), "little", signed=True))
        return end

    def int_text(self, position: int) -> int:
        end = self.line(position)
        text = self.data[position:end].rstrip(b"L")
        if len(text) > 2 * LONGEST_NUMBER:
            raise Bad(f"a number of {len(text)} digits")
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

    def piece(self, start: int, end: int) -> bytes:
        if end > len(self.data):
            raise Bad("it ends too early")
        return self.data[start:end]

    def line(self, start: int) -> int:
        end = self.data.find(b"\n", start)
        if end < 0:
            raise Bad("it ends too early")
        return end

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
        run = _GETS.match(self.data, position - 1)
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
