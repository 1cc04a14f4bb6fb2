"""Pieces of HTML that every report is made of. What goes into a cell is HTML already; names are escaped by who puts them in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from html import escape
from pathlib import Path

from nbguard.memory.breakdown import DevicePart
from nbguard.render.rows import Row, pool_table
from nbguard.reports.report import DeviceReport
from nbguard.units import format_column, unit_of

_STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
_COLOURS: dict[str, str] = {
    DevicePart.CONTEXT: "ctx",
    DevicePart.ALLOCATED: "used",
    DevicePart.RELEASABLE: "rel",
    DevicePart.CACHED: "rel",
    DevicePart.STRANDED: "strand",
    DevicePart.GRAPH_POOLS: "strand",
    DevicePart.PENDING: "strand",
}
_COLUMNS = ("held by", "frees now", "reaches", "since", "what")
_FIGURES = (1, 2)


def page(body: str, label: str = "GPU memory report") -> str:
    """Return a whole result as HTML, with its style; `label` says to who cannot see it what it is."""
    return f'<style>{_STYLE}</style><div class="nbguard" role="region" aria-label="{escape(label)}">{body}</div>'


def listed(sentences: Iterable[str], *, is_numbered: bool = False) -> str:
    """Return sentences as a list; nothing without any."""
    items = "".join(f"<li>{with_code(sentence)}</li>" for sentence in sentences)
    tag = "ol" if is_numbered else "ul"
    return f"<{tag}>{items}</{tag}>" if items else ""


def with_code(sentence: str) -> str:
    """Return a sentence as HTML, what stands between backticks set as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))


def head_line(name: str, what: str, right: str) -> str:
    """Return the line above a bar or a table: what it is about, and its figure at the right."""
    words = f'<b>{escape(name)}</b><span class="dim">{escape(what)}</span><span class="right">{right}</span>'
    return f'<div class="head">{words}</div>'


def table_row(*cells: str, numbers: Collection[int] = (), row: str = "tr") -> str:
    """Return a table row of cells that are HTML already; those at the places `numbers` are set as figures."""
    body = "".join(f'<td class="n">{cell}</td>' if place in numbers else f"<td>{cell}</td>" for place, cell in enumerate(cells))
    return f"<{row}>{body}</tr>"


def columns(names: Iterable[str], figures: Collection[int], body: str) -> str:
    """Return a table of rows that are HTML already, under these headings."""
    head = (f'<th scope="col"{" class=n" if place in figures else ""}>{name}</th>' for place, name in enumerate(names))
    return f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>{body}</tbody></table>"


def bar(device: DeviceReport, label: str) -> str:
    """Return the parts of a device as a bar with its key."""
    if len(device.parts) < 2:
        return ""
    whole = device.total or sum(part.nbytes for part in device.parts) or 1
    figures = format_column([part.nbytes for part in device.parts], unit_of(sum(part.nbytes for part in device.parts)))
    cells, keys = "", ""
    for part, figure in zip(device.parts, figures, strict=True):
        colour = f"background:var(--{_COLOURS.get(part.name, 'other')})" if part.name != DevicePart.FREE else ""
        if part.name != DevicePart.FREE:
            cells += f'<i style="width:{100 * part.nbytes / whole:.3f}%;{colour}"></i>'
        keys += f'<span title="{escape(part.note)}"><i style="{colour}"></i>{escape(part.label)} <b>{figure}</b></span>'
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}</div><div class="key">{keys}</div>'


def pools(device: DeviceReport) -> str:
    """Return the allocator's pools as a table behind a fold: of interest when memory is free and yet none is to be had."""
    table = pool_table(device)
    if not table:
        return ""
    head, *rows, total = table
    figures = range(1, len(head))
    body = "".join(table_row(*map(escape, row), numbers=figures) for row in rows)
    body += table_row(*total, numbers=figures, row='tr class="sum"')
    return f"<details><summary>the cache, by pool and stream</summary>{columns(head, figures, body)}</details>"


def holder_table(rows: list[Row], total: str) -> str:
    """Return holders as a table with its total."""
    body = ""
    for row in rows:
        chip = '<span class="chip">stale</span> ' if row.stale else ""
        name, what = f"<code>{escape(row.name)}</code>", chip + escape(row.what)
        body += table_row(
            name, row.retained, row.reaches, row.since, what, numbers=_FIGURES, row=f'tr title="{escape(row.command)}"'
        )
    body += table_row("", total, "", "", "allocated", numbers=_FIGURES, row='tr class="sum"')
    return columns(_COLUMNS, _FIGURES, body)
