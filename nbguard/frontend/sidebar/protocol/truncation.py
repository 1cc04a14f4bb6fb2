"""Text and lists cut so that they fit into a message: a name may be 10 kB long, and there may be a thousand of them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from nbguard.plain_data import to_plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Found = TypeVar("Found", bound="DataclassInstance")

TEXT = 200
"""So many bytes of a label, a path or a description are sent."""
_UNSEEN = ("Cc", "Cs")


def truncate_utf8(text: str, limit: int = TEXT) -> str:
    """Return `text` in at most `limit` bytes of UTF-8, an ellipsis at its end if it was longer.

    Control characters become spaces, and half a surrogate pair, which no encoding can write, a replacement character.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    printable = "".join(_shown(each) if unicodedata.category(each) in _UNSEEN else each for each in text[: limit + 1])
    encoded = printable.encode()
    if len(encoded) <= limit and len(text) <= limit:
        return printable
    return encoded[: limit - len("…".encode())].decode(errors="ignore") + "…"


def _shown(character: str) -> str:
    return "�" if unicodedata.category(character) == "Cs" else " "


def json_bytes(message: DataclassInstance) -> int:
    """Return the bytes that a view takes as JSON, as Jupyter writes it."""
    return len(json.dumps(to_plain(message), ensure_ascii=False).encode(errors="replace"))


def fitting(rows: Iterable[Found], room: int) -> tuple[Found, ...]:
    """Return as many of `rows`, from the first on, as fit into `room` bytes of JSON."""
    used = 0

    def fits(row: Found) -> bool:
        nonlocal used
        used += json_bytes(row) + len(", ")
        return used <= room

    return tuple(takewhile(fits, rows))
