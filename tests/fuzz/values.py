"""Values that a field was not made for, and changes of valid data and texts. All by a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

ESCAPES = "\x1b[31mred\x1b]0;title\x07\u202e\x9b2J\r\x08"
HTML = "<img src=x onerror=alert(1)>"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = (
    *(0, 1, 2, -1, 7, 512, 65_535, 65_536, 1_048_575, 10**9, 2**31, 2**53, 2**60, 2**63 - 1, 2**63, 2**64, 2**70, 2**127),
    *(-(2**31), -(2**63), -(2**70), 10**400, 0.5, -0.0, 1e-320, 1e300, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *(
        "",
        "x",
        "1",
        "9" * 5000,
        "a" * 5000,
        ESCAPES,
        HTML,
        f"`{HTML}`",
        "\ud800",
        "\0",
        "~nosuchuser/x",
        "../../x",
        "\n" * 3000,
    ),
    *(
        "2.13",
        "99.99999999",
        "nan",
        "inf",
        "%s%n{0}",
        "\N{ARABIC-INDIC DIGIT FIVE}",
        'File "x", line 9' * 300,
        "a.b:1, in x\n" * 300,
    ),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], {"": 0}, [0] * 2000, [-1], [10**400], ["x", []], {"columns": [], "rows": []}),
    *({HTML: ESCAPES}, _nested(150), [1, 2, 3], {"0": None}),
)
HOSTILE: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)


def changed(data: Any, rng: random.Random) -> Any:
    """Return JSON data of which a few places hold something else, are gone, or are there twice."""
    data = copy.deepcopy(data)
    is_gentle = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change(data, rng, is_gentle)
    return data


def _change(data: Any, rng: random.Random, is_gentle: bool) -> None:
    """Change one place; gently: to a value of the same type, which gets further."""
    holder = data
    while True:
        keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.93:
            holder = holder[key]
            continue
        match rng.randrange(5) if not is_gentle else 9:
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(rng.choice((holder[key], *HOSTILE))))
            case 2 if isinstance(holder, dict):
                holder[rng.choice(TEXTS)] = rng.choice(HOSTILE)
            case 3 if isinstance(holder[key], str):
                holder[key] += rng.choice(TEXTS)
            case 9:
                holder[key] = rng.choice(_alike(holder[key]))
            case _:
                holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        return


def _alike(value: Any) -> Sequence[Any]:
    if type(value) is str:
        return TEXTS
    if type(value) is bool:
        return (True, False)
    return [each for each in NUMBERS if type(each) is type(value) and not abs(each) >= 2**63] or HOSTILE


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which a few are others, are gone, or are there twice."""
    data = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        place = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place : place + rng.choice((1, 2, 8, 64))]
            case 2:
                data[place:place] = rng.randbytes(rng.choice((1, 4, 16)))
            case 3:
                data[place:place] = data[rng.randrange(len(data)) :][: rng.choice((8, 64, 512))]
            case _:
                del data[place:]
        if not data:
            return b"\0"
    return bytes(data)


def repeated(text: str, rng: random.Random) -> str:
    """Return a text of which a few pieces stand many times in a row: what regular expressions go astray in."""
    for _ in range(rng.choice((1, 2, 3))):
        start = rng.randrange(len(text) + 1)
        piece = text[start : start + rng.choice((1, 2, 5, 20, 80))] or rng.choice((" ", "\n", " \n", "a", "1", "'", "<", ": "))
        place = rng.randrange(len(text) + 1)
        text = text[:place] + piece * (rng.choice((3, 300, 60_000)) // len(piece) + 1) + text[place:]
    return text
