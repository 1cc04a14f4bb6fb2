"""The markup of the built pages, completed where the theme leaves out what screen readers and keyboards need."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_MARKUP = (
    ('role="heading">', 'role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    ('<aside class="toc-drawer">', '<aside class="toc-drawer" aria-label="This page">'),
    ('<aside class="toc-drawer no-toc">', '<aside class="toc-drawer no-toc" aria-label="This page">'),
    ('<th class="head"><p></p></th>', '<td class="head"></td>'),
    ("<pre>", '<pre tabindex="0">'),
    ('<div id="search-results"></div>', '<h1>Search</h1>\n<div id="search-results" class="results"></div>'),
    ('docutils container">', 'docutils container" tabindex="0">'),
)
"""What the theme writes, and what it means; after which it is not written so again."""


def complete_markup(app: Sphinx, error: Exception | None) -> None:
    """Give the theme's pages what screen readers and keyboards need: levels of headings, names of columns, places to scroll."""
    if error is not None or app.builder.format != "html":
        return
    for page in app.outdir.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for markup, complete in _MARKUP:
            text = text.replace(markup, complete)
        page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Complete the pages once they are all there."""
    app.connect("build-finished", complete_markup)
    return {"parallel_read_safe": True}
