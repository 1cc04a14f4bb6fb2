"""Reports as self-contained HTML: no script, no network, only colours of the host's theme. Every name is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from nbguard.cleanup.plan.parking import Unparked
from nbguard.cleanup.plan.plan import Outcome, Plan
from nbguard.memory.explain import Why
from nbguard.memory.processes import Zombies
from nbguard.render.elements import bar, head_line, holder_table, listed, page, pools, table_row, with_code
from nbguard.render.rows import (
    holder_rows,
    left_rows,
    notes,
    outcome_summary,
    pinned_line,
    plan_rows,
    plan_summary,
    unparked_lines,
)
from nbguard.render.tree import branches
from nbguard.render.zombies import verdict_head, verdict_rows, zombie_rows, zombies_summary
from nbguard.reports.report import DeviceReport, Report
from nbguard.units import format_bytes


def report_html(report: Report, limit: int = 12) -> str:
    """Return a report as HTML; at most `limit` holders per device."""
    body = f'<div class="dim">{escape(report.headline)}</div>' if report.headline else ""
    body += "".join(_device(device, limit) for device in report.devices)
    body += f'<div class="dim">{escape(pinned_line(report.pinned))}</div>' if report.pinned else ""
    return page(
        body
        + listed(finding.sentence for finding in report.findings)
        + listed(missing.reason for missing in report.unavailable)
    )


def _device(device: DeviceReport, limit: int) -> str:
    if device.total is None:
        right = f"{format_bytes(device.allocated)} in {device.storages} storage{'s' if device.storages != 1 else ''}"
    else:
        right = f"this kernel {format_bytes(device.kernel)} of {format_bytes(device.total)}"
    head = head_line(device.device, device.name, right)
    rows, total = holder_rows(device, limit)
    table = holder_table(rows, total) if rows else '<div class="dim">nothing is held here</div>'
    return head + bar(device, right) + table + pools(device)


def _steps(rows: Iterable[tuple[str, str, str]]) -> str:
    body = "".join(
        table_row(escape(what), figure, f'<span class="dim">{with_code(detail)}</span>', numbers=(1,))
        for what, figure, detail in rows
    )
    return f'<table class="steps"><tbody>{body}</tbody></table>' if body else ""


def plan_html(plan: Plan) -> str:
    """Return a plan that has not been carried out as HTML."""
    return page(f"{_steps(plan_rows(plan))}<div>{escape(plan_summary(plan))}</div>{listed(plan.skipped)}")


def outcome_html(outcome: Outcome) -> str:
    """Return what a cleanup did as HTML."""
    done = {action.label for action in outcome.done}
    steps = _steps(row for row in plan_rows(outcome.plan) if row[0] in done)
    left = list(left_rows(outcome))
    rest = f'<div class="dim">left alone: {escape(" · ".join(left))}</div>' if left else ""
    said = f"{steps}<div><b>{escape(outcome_summary(outcome))}</b></div>{listed(notes(outcome))}{rest}"
    if outcome.verdict is not None:
        said += f"<div>{escape(verdict_head(outcome.verdict))}</div>{_steps(verdict_rows(outcome.verdict))}"
        said += f"<div><b>{escape(outcome.verdict.reason)}</b></div>"
    return page(said + ("" if outcome.zombies is None else _zombies(outcome.zombies)))


def zombies_html(zombies: Zombies) -> str:
    """Return the processes on the GPUs as HTML."""
    return page(_zombies(zombies))


def _zombies(zombies: Zombies) -> str:
    return _steps(zombie_rows(zombies)) + listed(zombies_summary(zombies))


def unparked_html(found: Unparked) -> str:
    """Return what `--unpark` did as HTML."""
    return page("".join(f"<div>{escape(line)}</div>" for line in unparked_lines(found)))


def why_html(why: Why) -> str:
    """Return the paths that keep something alive as HTML."""
    head = head_line(why.name, why.what, f"reaches {format_bytes(why.nbytes)}")
    body = ""
    for line in branches(why):
        mark = f'<span class="chip">{line.mark}</span>' if line.mark == "stale" else line.mark
        tree = f'<span class="rails" aria-hidden="true">{line.rails}</span><code>{escape(line.text)}</code>'
        body += table_row(tree, line.cell, mark, f"<code>{escape(line.release)}</code>")
    table = (
        f'<table class="tree"><tbody>{body}</tbody></table>' if body else '<div class="dim">nothing of yours leads to it</div>'
    )
    return page(head + table)
