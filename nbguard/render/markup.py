"""HTML and SVG as a type, where text becomes `Html` only by being escaped, so that a name cannot end up in a page as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as _escape

from nbguard.texts import printable

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
