"""Reports as self-contained HTML: no script, no network, only colours of the host's theme. Every name is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from nbguard.core.cleanup import Outcome, Plan
from nbguard.core.report import DeviceReport, Report
from nbguard.core.why import Why
from nbguard.render.rows import Row, holder_rows, left_rows, notes, outcome_summary, plan_rows, plan_summary
from nbguard.units import format_bytes, format_column, unit_of

# One sheet for JupyterLab, Notebook 7 (their variables), and any other host (the fallbacks, and its colour scheme).
_STYLE = """<style>
.nbguard{--ink:var(--jp-ui-font-color1,inherit);--dim:var(--jp-ui-font-color2,#767676);--line:var(--jp-border-color2,#8884);
--accent:var(--jp-brand-color1,#1976d2);--warn:var(--jp-warn-color0,#b26a00);
--used:#3b6fb6;--rel:#9dbde3;--strand:#e0a458;--ctx:#8e8e9c;--other:#b9b9c4;
font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--ink);font-variant-numeric:tabular-nums;max-width:860px;padding:4px 0}
[data-jp-theme-light=false] .nbguard{--used:#5d93dd;--rel:#35506f;--strand:#b07a2f;--ctx:#6d6d78;--other:#4a4a52}
.nbguard .head{display:flex;gap:8px;align-items:baseline}.nbguard .head b{font-weight:600}.nbguard .dim{color:var(--dim)}.nbguard .right{margin-left:auto}
.nbguard .bar{display:flex;height:14px;border:1px solid var(--line);border-radius:3px;overflow:hidden;margin:6px 0 4px}.nbguard .bar i{display:block}
.nbguard .key{display:flex;flex-wrap:wrap;gap:2px 16px;color:var(--dim)}.nbguard .key b{color:var(--ink);font-weight:400}
.nbguard .key i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;border:1px solid var(--line)}
.nbguard table{border-collapse:collapse;width:100%;margin:8px 0 4px;border:0;table-layout:auto;font-size:13px}
.nbguard tr,.nbguard tbody tr:nth-child(odd),.nbguard tbody tr:nth-child(even){background:none}
.nbguard th{font-weight:600;color:var(--dim);font-size:12px;text-align:left;border:0;padding:2px 12px 2px 0}
.nbguard td{border:0;border-top:1px solid var(--line);padding:3px 12px 3px 0;text-align:left;vertical-align:top;white-space:normal}
.nbguard .n{text-align:right;white-space:nowrap}.nbguard .sum td{border-top:1px solid var(--dim)}
.nbguard code{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;background:none;color:inherit;padding:0;overflow-wrap:anywhere}
.nbguard .chip{font-size:11px;border-radius:8px;padding:0 6px;border:1px solid var(--warn);color:var(--warn);white-space:nowrap}
.nbguard ul{margin:6px 0 0;padding-left:18px}.nbguard li{margin:1px 0}
</style>"""
_COLOURS = {
    "context": "ctx",
    "allocated": "used",
    "releasable": "rel",
    "cached": "rel",
    "stranded": "strand",
    "pending": "strand",
}


def report_html(report: Report, limit: int = 12) -> str:
    """Return a report as HTML; at most `limit` holders per device."""
    body = f'<div class="dim">{escape(report.headline)}</div>' if report.headline else ""
    body += "".join(_device(device, limit) for device in report.devices)
    return _page(
        body
        + _list(finding.sentence for finding in report.findings)
        + _list(missing.reason for missing in report.unavailable)
    )


def _page(body: str) -> str:
    return f'{_STYLE}<div class="nbguard" role="region" aria-label="GPU memory report">{body}</div>'


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _with_code(sentence: str) -> str:
    """Return a sentence with the magics in it set as code."""
    words = escape(sentence).split(" %")
    done = words[0] if not words[0].startswith("%") else f"<code>{words[0]}</code>"
    for word in words[1:]:
        command, stop, rest = _split_command(word)
        done += f" <code>%{command}</code>{stop}{rest}"
    return done


def _split_command(text: str) -> tuple[str, str, str]:
    for stop in (")", ";", ": ", " frees", " lets", " ends", " shows", " to "):
        if stop in text:
            command, found, rest = text.partition(stop)
            return command, found, rest
    return text, "", ""


def _device(device: DeviceReport, limit: int) -> str:
    if device.total is None:
        right = f"{format_bytes(device.allocated)} in {device.storages} storage{'s' if device.storages != 1 else ''}"
    else:
        right = f"this kernel {format_bytes(device.kernel)} of {format_bytes(device.total)}"
    head = f'<div class="head"><b>{escape(device.device)}</b><span class="dim">{escape(device.name)}</span><span class="right">{right}</span></div>'
    rows, total = holder_rows(device, limit)
    table = _table(rows, total) if rows else '<div class="dim">nothing is held here</div>'
    return head + _bar(device, right) + table


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


def _table(rows: list[Row], total: str) -> str:
    head = '<tr><th scope="col">held by</th><th scope="col" class="n">frees now</th><th scope="col" class="n">reaches</th><th scope="col">since</th><th scope="col">what</th></tr>'
    body = ""
    for row in rows:
        chip = '<span class="chip">stale</span> ' if row.stale else ""
        title = f' title="{escape(row.command)}"' if row.command else ""
        body += (
            f'<tr{title}><td><code>{escape(row.name)}</code></td><td class="n">{row.retained}</td><td class="n">{row.reaches}</td>'
            f"<td>{row.since}</td><td>{chip}{escape(row.what)}</td></tr>"
        )
    body += f'<tr class="sum"><td></td><td class="n">{total}</td><td colspan="3">allocated</td></tr>'
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _steps(rows: Iterable[tuple[str, str, str]]) -> str:
    body = "".join(
        f'<tr><td>{escape(what)}</td><td class="n">{figure}</td><td class="dim">{escape(detail)}</td></tr>'
        for what, figure, detail in rows
    )
    return f"<table><tbody>{body}</tbody></table>" if body else ""


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
    head = f'<div class="head"><code>{escape(why.name)}</code><span class="dim">{escape(why.what)}</span><span class="right">reaches {format_bytes(why.nbytes)}</span></div>'
    body = ""
    for path in why.paths:
        chip = '<span class="chip">stale</span>' if path.stale else ""
        cell = f"In[{path.cell}]" if path.cell is not None else ""
        memory = "its memory" if path.storages_only else ""
        body += f"<tr><td><code>{escape(path.text)}</code></td><td>{cell}</td><td>{chip} {memory}</td><td><code>{escape(path.release)}</code></td></tr>"
    return _page(
        f"{head}<table><tbody>{body}</tbody></table>"
        if body
        else f'{head}<div class="dim">nothing of yours leads to it</div>'
    )
