"""A result as a web page of its own, in one file, without script, that fetches nothing."""

from __future__ import annotations

from nbguard.render.html import blocks_html
from nbguard.render.markup import Html, join, style_sheet, tag
from nbguard.render.result import Result

_STYLE = style_sheet(
    """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 14px/1.5 system-ui, sans-serif;
       background: Canvas; color: CanvasText; }
"""
)


def page(result: Result, **details: int) -> str:
    """Return the HTML document; `details` as in `Result.blocks`."""
    title = f"nbguard: {result.label}"
    head = tag("head", Html('<meta charset="utf-8">'), tag("title", title), _STYLE)
    body = tag("body", tag("main", tag("h1", title), blocks_html(result.blocks(**details), result.label)))
    return str(join((Html("<!DOCTYPE html>\n"), tag("html", head, body, lang="en"))))
