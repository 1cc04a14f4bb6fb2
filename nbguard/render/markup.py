"""HTML and SVG as a type, where text becomes `Html` only by being escaped, so that a name cannot end up in a page as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from html import escape as _escape

from nbguard.texts import printable

# --- Text that can be shown anywhere, of limited length, and without characters that would harm a terminal


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


# --- markup


_KEPT = "\n\t"
_BARE = frozenset({"path", "rect"})
"""Elements that are written without an end tag where they are empty."""


class Html(str):
    """HTML in a string. Made by `Html(text)`, which escapes plain text, by `tag` and by `join`.

    Adding and formatting are `str`'s own and return a `str`: the sum is no `Html` any more, and is escaped where it is used.
    """

    __slots__ = ()

    def __new__(cls, text: str = "") -> Html:
        """Return text escaped, HTML as it is."""
        return text if isinstance(text, Html) else _as_html(_escape(printable(text, _KEPT)))


def _as_html(written: str) -> Html:
    """Return HTML that this module has written."""
    return str.__new__(Html, written)


def join(parts: Iterable[str]) -> Html:
    """Return parts behind one another; those that are not HTML are escaped."""
    return _as_html("".join(map(Html, parts)))


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """Return an element; children that are not HTML are escaped, and so are attributes.

    Args:
        name: of the element.
        children: text and HTML.
        attributes: by name, `class_` for class and `aria_label` for aria-label; those that are None or empty are left out.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escape(printable(str(value), _KEPT))}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    )
    if not children and name in _BARE:
        return _as_html(f"<{name}{words}/>")
    return _as_html(f"<{name}{words}>{join(children)}</{name}>")


def style_sheet(css: str) -> Html:
    """Return a style sheet as an element; it is a file of ours, and not escaped."""
    return _as_html(f"<style>{css}</style>")


def with_code(sentence: str) -> Html:
    """Return a sentence as HTML, escaped; text between backticks is set as code."""
    return _as_html(re.sub("`([^`]+)`", r"<code>\1</code>", Html(sentence)))
