"""Mimebundles under the running cell, and those of single lines."""

from __future__ import annotations

from typing import Any

from nbguard.printable import printable
from nbguard.render.markup import tag

_STYLE = "font-size:12px;line-height:1.45;color:var(--jp-ui-font-color2,#767676);font-variant-numeric:tabular-nums"


def line_bundle(sentence: str) -> dict[str, str]:
    """Return a line as text and as small HTML, without the style sheet of a report: there is one under every cell."""
    return {"text/plain": printable(sentence), "text/html": str(tag("div", sentence, style=_STYLE))}


def display_bundle(bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display a mimebundle under the running cell; the notebook keeps the `metadata` with the output."""
    from IPython.display import display

    display(bundle, raw=True, metadata=metadata or None)  # type: ignore[no-untyped-call]
