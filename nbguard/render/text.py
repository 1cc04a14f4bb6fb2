"""Reports as aligned text for a terminal, at most some 100 characters wide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nbguard.cleanup.plan.parking import Unparked
from nbguard.cleanup.plan.plan import Outcome, Plan
from nbguard.memory.breakdown import DevicePart
from nbguard.memory.explain import Why
from nbguard.memory.processes import Zombies
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
    unparked_lines,
)
from nbguard.render.tree import branches
from nbguard.render.zombies import verdict_head, verdict_rows, zombie_rows, zombies_summary
from nbguard.reports.report import DeviceReport, Report
from nbguard.units import format_bytes, format_column, unit_of

_WIDTH = 72
_MARKS: dict[str, str] = {
    DevicePart.CONTEXT: "█",
    DevicePart.ALLOCATED: "█",
    DevicePart.RELEASABLE: "▒",
    DevicePart.CACHED: "▒",
    DevicePart.STRANDED: "▓",
    DevicePart.GRAPH_POOLS: "▓",
    DevicePart.PENDING: "▓",
    DevicePart.FREE: " ",
}


def report_text(report: Report, limit: int = 12) -> str:
    """Return a report as text; at most `limit` holders per device."""
    lines = [report.headline] if report.headline else []
    for device in report.devices:
        lines += [*_device(device, limit), ""]
    lines += [f"  {pinned_line(report.pinned)}", ""] if report.pinned else []
    lines += [f"  • {finding.sentence.replace('`', '')}" for finding in report.findings]
    lines += [f"  ○ {missing.reason}" for missing in report.unavailable]
    return "\n".join(lines).rstrip()


def _device(device: DeviceReport, limit: int) -> Iterator[str]:
    if device.total is None:
        storages = f"{device.storages} storage{'s' if device.storages != 1 else ''}"
        yield f"{device.device}  {format_bytes(device.allocated)} in {storages}"
    else:
        head = f"{device.device}  {device.name}"
        right = f"this kernel {format_bytes(device.kernel)} of {format_bytes(device.total)}"
        yield f"{head}{right:>{max(len(right) + 2, 100 - len(head))}}"
        yield f"  ▏{_bar(device)}▏"
    if len(device.parts) > 1:
        unit = unit_of(sum(part.nbytes for part in device.parts))
        figures = format_column([part.nbytes for part in device.parts], unit)
        yield "  " + "   ".join(f"{part.label} {figure}" for part, figure in zip(device.parts, figures, strict=True))
    rows, total = holder_rows(device, limit)
    yield from ["", *holder_lines(rows, total)] if rows else ["  nothing is held here"]
    pools = pool_table(device)
    yield from ["", *_aligned(pools)] if pools else []


def _aligned(table: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a table whose first column is words and whose others are figures."""
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for row in table:
        figures = "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        yield f"  {row[0]:<{widths[0]}}  {figures}".rstrip()


def _bar(device: DeviceReport) -> str:
    total = device.total or 1
    text = ""
    reached = 0
    for part in device.parts:
        reached += part.nbytes
        mark = _MARKS.get(part.name, "░")
        cells = round(reached / total * _WIDTH) - len(text)
        text += mark * max(cells, 1 if part.nbytes > total / 1000 and part.name != DevicePart.FREE else 0)
    return text[:_WIDTH].ljust(_WIDTH)


def holder_lines(rows: list[Row], total: str) -> Iterator[str]:
    """Yield holders as an aligned table with its total."""
    head = Row(name="held by", retained="frees now", reaches="reaches", since="since", what="what")
    lines = (head, *rows)
    name = max(len(_clip(row.name)) for row in lines)
    retained = max(len(total), *(len(row.retained) for row in lines))
    reaches, since = (max(len(getattr(row, column)) for row in lines) for column in ("reaches", "since"))
    for row in lines:
        what = f"stale · {row.what}" if row.stale else row.what
        figures = f"{row.retained:>{retained}}  {row.reaches:>{reaches}}"
        yield f"  {_clip(row.name):<{name}}  {figures}  {row.since:<{since}}  {what}".rstrip()
    yield f"  {'':<{name}}  {total:>{retained}}  allocated"


def _clip(name: str, width: int = 40) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def plan_text(plan: Plan) -> str:
    """Return a plan that has not been carried out as text."""
    lines = [*_steps(plan_rows(plan)), f"  {plan_summary(plan)}"]
    return "\n".join([*lines, *(f"  {skipped}" for skipped in plan.skipped)])


def outcome_text(outcome: Outcome) -> str:
    """Return what a cleanup did as text."""
    done = {action.label for action in outcome.done}
    lines = _steps(row for row in plan_rows(outcome.plan) if row[0] in done)
    lines.append(f"  {outcome_summary(outcome)}")
    lines += [f"  {note}" for note in notes(outcome)]
    left = list(left_rows(outcome))
    if left:
        lines.append("  left alone: " + " · ".join(left))
    if outcome.verdict is not None:
        lines += [f"  {verdict_head(outcome.verdict)}", *(f"  {line}" for line in _steps(verdict_rows(outcome.verdict)))]
        lines.append(f"  {outcome.verdict.reason}")
    if outcome.zombies is not None:
        lines.append(zombies_text(outcome.zombies))
    return "\n".join(line.replace("`", "") for line in lines)


def zombies_text(zombies: Zombies) -> str:
    """Return the processes on the GPUs as text."""
    lines = [*_steps(zombie_rows(zombies)), *(f"  {sentence}" for sentence in zombies_summary(zombies))]
    return "\n".join(lines).replace("`", "")


def _steps(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    found = list(rows)
    width = max((len(what) for what, _, _ in found), default=0)
    figures = max((len(figure) for _, figure, _ in found), default=0)
    return [f"  {what:<{width}}  {figure:>{figures}}  {detail}".rstrip() for what, figure, detail in found]


def unparked_text(found: Unparked) -> str:
    """Return what `--unpark` did as text."""
    return "\n".join(f"  {line}" for line in unparked_lines(found))


def why_text(why: Why) -> str:
    """Return the paths that keep something alive as text."""
    head = f"{why.name}  {why.what}  reaches {format_bytes(why.nbytes)}"
    if not why.paths:
        return f"{head}\n  nothing of yours leads to it"
    rows = [(f"{line.rails}{line.text}", line.cell, line.mark, line.release) for line in branches(why)]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    shown = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows]
    return "\n".join([head, *(f"  {line}" for line in shown)])
