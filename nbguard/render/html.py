"""Reports as self-contained HTML: no script, no network, only colours of the host's theme. Every name is escaped."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from html import escape
from pathlib import Path

from nbguard.core.plan import Outcome, Plan
from nbguard.core.report import DeviceReport, Report
from nbguard.core.why import Why
from nbguard.render.rows import (
    Row,
    holder_rows,
    left_rows,
    notes,
    outcome_summary,
    pinned_line,
    plan_rows,
    plan_summary,
    pool_table,
)
from nbguard.units import format_bytes, format_column, unit_of

_STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
_COLOURS = {
    "context": "ctx",
    "allocated": "used",
    "releasable": "rel",
    "cached": "rel",
    "stranded": "strand",
    "graph pools": "strand",
    "pending": "strand",
}


def report_html(report: Report, limit: int = 12) -> str:
    """Return a report as HTML; at most `limit` holders per device."""
    body = f'<div class="dim">{escape(report.headline)}</div>' if report.headline else ""
    body += "".join(_device(device, limit) for device in report.devices)
    body += f'<div class="dim">{escape(pinned_line(report.pinned))}</div>' if report.pinned else ""
    return _page(
        body + _list(finding.sentence for finding in report.findings) + _list(missing.reason for missing in report.unavailable)
    )


def _page(body: str) -> str:
    return f'<style>{_STYLE}</style><div class="nbguard" role="region" aria-label="GPU memory report">{body}</div>'


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _with_code(sentence: str) -> str:
    """Return a sentence as HTML, what stands between backticks set as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _head(name: str, what: str, right: str) -> str:
    """Return the line above a bar or a table: what it is about, and its figure at the right."""
    words = f'<b>{escape(name)}</b><span class="dim">{escape(what)}</span><span class="right">{right}</span>'
    return f'<div class="head">{words}</div>'


def _row(*cells: str, numbers: Collection[int] = (), row: str = "tr") -> str:
    """Return a table row of cells that are HTML already; those at the places `numbers` are set as figures."""
    body = "".join(f'<td class="n">{cell}</td>' if place in numbers else f"<td>{cell}</td>" for place, cell in enumerate(cells))
    return f"<{row}>{body}</tr>"


def _device(device: DeviceReport, limit: int) -> str:
    if device.total is None:
        right = f"{format_bytes(device.allocated)} in {device.storages} storage{'s' if device.storages != 1 else ''}"
    else:
        right = f"this kernel {format_bytes(device.kernel)} of {format_bytes(device.total)}"
    head = _head(device.device, device.name, right)
    rows, total = holder_rows(device, limit)
    table = _table(rows, total) if rows else '<div class="dim">nothing is held here</div>'
    return head + _bar(device, right) + table + _pools(device)


def _pools(device: DeviceReport) -> str:
    """Return the allocator's pools as a table behind a fold: of interest when memory is free and yet none is to be had."""
    table = pool_table(device)
    if not table:
        return ""
    head, *rows, total = table
    figures = range(1, len(head))
    body = "".join(_row(*map(escape, row), numbers=figures) for row in rows)
    body += _row(*total, numbers=figures, row='tr class="sum"')
    return f"<details><summary>the cache, by pool and stream</summary>{_columns(head, figures, body)}</details>"


def _bar(device: DeviceReport, label: str) -> str:
    if len(device.parts) < 2:
        return ""
    whole = device.total or sum(part.nbytes for part in device.parts) or 1
    figures = format_column([part.nbytes for part in device.parts], unit_of(sum(part.nbytes for part in device.parts)))
    cells, keys = "", ""
    for part, figure in zip(device.parts, figures, strict=True):
        colour = f"background:var(--{_COLOURS.get(part.name, 'other')})" if part.name != "free" else ""
        if part.name != "free":
            cells += f'<i style="width:{100 * part.nbytes / whole:.3f}%;{colour}"></i>'
        keys += f'<span title="{escape(part.note)}"><i style="{colour}"></i>{escape(part.name)} <b>{figure}</b></span>'
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}</div><div class="key">{keys}</div>'


_COLUMNS = ("held by", "frees now", "reaches", "since", "what")
_FIGURES = (1, 2)


def _table(rows: list[Row], total: str) -> str:
    body = ""
    for row in rows:
        chip = '<span class="chip">stale</span> ' if row.stale else ""
        name, what = f"<code>{escape(row.name)}</code>", chip + escape(row.what)
        body += _row(
            name, row.retained, row.reaches, row.since, what, numbers=_FIGURES, row=f'tr title="{escape(row.command)}"'
        )
    body += _row("", total, "", "", "allocated", numbers=_FIGURES, row='tr class="sum"')
    return _columns(_COLUMNS, _FIGURES, body)


def _columns(names: Iterable[str], figures: Collection[int], body: str) -> str:
    """Return a table of rows that are HTML already, under these headings."""
    head = (f'<th scope="col"{" class=n" if place in figures else ""}>{name}</th>' for place, name in enumerate(names))
    return f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>{body}</tbody></table>"


def _steps(rows: Iterable[tuple[str, str, str]]) -> str:
    body = "".join(
        _row(escape(what), figure, f'<span class="dim">{escape(detail)}</span>', numbers=(1,)) for what, figure, detail in rows
    )
    return f'<table class="steps"><tbody>{body}</tbody></table>' if body else ""


def plan_html(plan: Plan) -> str:
    """Return a plan that has not been carried out as HTML."""
    return _page(f"{_steps(plan_rows(plan))}<div>{escape(plan_summary(plan))}</div>{_list(plan.skipped)}")


def outcome_html(outcome: Outcome) -> str:
    """Return what a cleanup did as HTML."""
    done = {action.label for action in outcome.done}
    steps = _steps(row for row in plan_rows(outcome.plan) if row[0] in done)
    left = list(left_rows(outcome))
    rest = f'<div class="dim">left alone: {escape(" · ".join(left))}</div>' if left else ""
    return _page(f"{steps}<div><b>{escape(outcome_summary(outcome))}</b></div>{_list(notes(outcome))}{rest}")


def why_html(why: Why) -> str:
    """Return the paths that keep something alive as HTML."""
    head = _head(why.name, why.what, f"reaches {format_bytes(why.nbytes)}")
    body = ""
    for path in why.paths:
        marks = ('<span class="chip">stale</span> ' if path.stale else "") + ("its memory" if path.storages_only else "")
        cell = f"In[{path.cell}]" if path.cell is not None else ""
        body += _row(f"<code>{escape(path.text)}</code>", cell, marks, f"<code>{escape(path.release)}</code>")
    table = f"<table><tbody>{body}</tbody></table>" if body else '<div class="dim">nothing of yours leads to it</div>'
    return _page(head + table)
