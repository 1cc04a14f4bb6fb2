"""Text that can be shown anywhere: of limited length, and without characters that would harm a terminal."""

from __future__ import annotations

NAME = 60
"""Characters of a name that are shown, and of a cell in a table but for the last, which may be a sentence."""
SENTENCE = 500
"""Characters of a sentence that are shown."""


def clip(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, the last an ellipsis where some are missing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean(text: str, limit: int = SENTENCE) -> str:
    """Return text as it can be shown anywhere: clipped, one line, nothing that steers a terminal or the reading direction."""
    return "".join(character if character.isprintable() else " " for character in clip(text, limit))


def line_words(place: str, line: int, function: str) -> str:
    """Return a line of code in words: `In[7], line 3 in step()`, `train.py:12 in step()`.

    `place` is a file's name or a cell, `In[7]`; no function is named at the top of either.
    """
    where = f"{place}, line {line}" if place.startswith("In[") else f"{place}:{line}"
    return where if not function or function.startswith("<") else f"{where} in {function}()"
