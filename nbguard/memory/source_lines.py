"""Lines of code in words: `In[7], line 3 in step()`, `train.py:12`."""

from __future__ import annotations


def line_words(place: str, line: int, function: str) -> str:
    """Return a line in words. `place` is a file's name or a cell, `In[7]`; no function is named at the top of either."""
    where = f"{place}, line {line}" if place.startswith("In[") else f"{place}:{line}"
    return where if not function or function.startswith("<") else f"{where} in {function}()"
