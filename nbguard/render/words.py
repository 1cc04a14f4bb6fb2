"""Text that can be shown anywhere, of limited length, and without characters that would harm a terminal."""

from __future__ import annotations

from collections.abc import Collection

from nbguard.texts import printable

NAME = 60
"""Characters of a name that are shown, and of a cell in a table but for the last, which may be a sentence."""
SENTENCE = 500
"""Characters of a sentence that are shown."""


def clip(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, the last an ellipsis where some are missing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clip_middle(text: str, limit: int) -> str:
    """Return a name of at most `limit` characters, with an ellipsis in its middle: its end says which one it is."""
    end = limit * 2 // 3
    return text if len(text) <= limit else f"{text[: limit - end - 1]}…{text[-end:]}"


def clean(text: str, limit: int = SENTENCE, *, is_name: bool = False) -> str:
    """Return text as it can be shown anywhere: clipped, one line, nothing that steers a terminal or the reading direction."""
    clipped = clip_middle(text, limit) if is_name else clip(text, limit)
    return printable(clipped)


def line_words(place: str, line: int, function: str) -> str:
    """Return a line of code in words: `In[7], line 3 in step()`, `train.py:12 in step()`.

    `place` is a file's name or a cell, `In[7]`; no function is named at the top of either.
    """
    where = f"{place}, line {line}" if place.startswith("In[") else f"{place}:{line}"
    return where if not function or function.startswith("<") else f"{where} in {function}()"


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Return things by their numbers: "rank 1", "ranks 0 and 2", "ranks 1, 2 and 3"."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) == 1:
        return f"{noun} {words[0]}"
    return f"{noun}s {', '.join(words[:-1])} and {words[-1]}"
