"""What text and HTML both show: the rows of a report and of a plan, already in words and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.cleanup.plan.parking import Unparked
from nbguard.cleanup.plan.plan import Action, Outcome, Plan
from nbguard.memory.facts import PinnedFacts
from nbguard.memory.graph import Holder
from nbguard.reports.report import DeviceReport
from nbguard.units import format_bytes, format_column, unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One holder as shown. `retained` and `reaches` are texts in the unit of their column."""

    name: str
    retained: str
    reaches: str
    since: str
    what: str
    stale: bool = False
    command: str = ""


def holder_rows(device: DeviceReport, limit: int) -> tuple[list[Row], str]:
    """Return at most `limit` rows, the rest in one, and the total: the figures shown re-add to the total shown."""
    alone = [holder for holder in device.holders if holder.retained]
    shown = alone[:limit] if alone else list(device.holders[:limit])
    rest = [holder for holder in device.holders if holder not in shown]
    unit = unit_of(device.allocated)
    rest_bytes = sum(holder.retained for holder in rest)
    figures = format_column([*(holder.retained for holder in shown), rest_bytes], unit)
    rows = [row_of(holder, figure, unit) for holder, figure in zip(shown, figures, strict=False)]
    if rest:
        names = ", ".join(holder.label for holder in rest[:4]) + (", …" if len(rest) > 4 else "")
        what = f"{names}: reach only what others hold too" if not rest_bytes else f"{names} (-n shows more)"
        rows.append(Row(name=f"{len(rest)} more", retained=figures[-1], reaches="", since="", what=what))
    return rows, format_column([device.allocated], unit)[0]


_POOLS_SHOWN = 8


def pool_table(device: DeviceReport) -> list[list[str]]:
    """Return the allocator's pools as a table: a heading, a row per pool, the total. Empty where nothing is free in any.

    The columns between `reserved` and `largest free` re-add to it along a row, every one to its total down the column.
    """
    spaces = [pool.space for pool in device.pools]
    if all(space.reserved == space.allocated for space in spaces):
        return []
    shown = {pool.name: [pool.space] for pool in device.pools[:_POOLS_SHOWN]}
    if rest := spaces[_POOLS_SHOWN:]:
        shown[f"{len(rest)} more"] = rest
    parts = {name: name for name in ("reserved", "allocated", "releasable", "stranded")}
    rare = {"kept": "graph pools", "pending": "pending"}
    parts |= {name: title for name, title in rare.items() if any(getattr(space, name) for space in spaces)}
    unit = unit_of(max(space.reserved for space in spaces))
    columns = []
    for name, title in parts.items():
        figures = [sum(getattr(space, name) for space in group) for group in shown.values()]
        columns.append([title, *format_column(figures, unit), *format_column([sum(figures)], unit)])
    largest = [max(space.largest_free for space in group) for group in shown.values()]
    columns.append(["largest free", *(format_column([each], unit)[0] for each in largest), ""])
    return [list(row) for row in zip(["cache", *shown, ""], *columns, strict=True)]


def pinned_line(pinned: PinnedFacts) -> str:
    """Return the words on page-locked host memory."""
    return (
        f"pinned host memory {format_bytes(pinned.reserved)}: {format_bytes(pinned.active)} in use, "
        f"{format_bytes(pinned.reserved - pinned.active)} kept for later (not of the device)"
    )


def row_of(holder: Holder, figure: str, unit: tuple[int, str]) -> Row:
    """Return a holder's row: `figure` is what it frees, `unit` that of the column."""
    name = holder.path if holder.stale and holder.path else holder.label
    reaches = "" if holder.is_shared or not holder.roots else format_column([holder.reaches], unit)[0]
    since = f"In[{holder.cell}]" if holder.cell is not None else ""
    what = f"{holder.what} (at least)" if holder.at_least else holder.what
    return Row(
        name=name,
        retained=figure,
        reaches=reaches,
        since=since,
        what=what,
        stale=holder.stale,
        command=command_of(holder.label, holder.kind, holder.stale),
    )


def command_of(label: str, kind: str, stale: bool) -> str:
    """Return the line that lets a holder go; empty where there is none."""
    if stale:
        return "%reset_gpu"
    return f"%reset_gpu {label.partition(' = ')[0]}" if kind in ("name", "out") else ""


def plan_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (what, bytes, detail) for each step of a plan; the bytes re-add to what is promised."""
    known = [action.nbytes or 0 for action in plan.actions]
    figures = format_column(known, unit_of(plan.promised))
    return [
        (action.label, _figure(action, figure), action.detail)
        for action, figure in zip(plan.actions, figures, strict=True)
        if action.nbytes != 0 or action.kind != "collect"
    ]


_OF_THE_HOST = frozenset({"workers", "pinned"})


def _figure(action: Action, figure: str) -> str:
    """Return a step's bytes as shown; what is about host memory says that in its detail."""
    if action.nbytes is None:
        return "measured after"
    return figure if action.nbytes or action.kind not in _OF_THE_HOST else ""


def plan_summary(plan: Plan) -> str:
    """Return the sentence under a plan that has not been carried out."""
    later = " · afterwards it lists the processes on the GPUs and says whether only a restart would help"
    later = later if plan.request.hard else ""
    if not plan.promised and all(action.kind == "collect" for action in plan.actions):
        cache = f", but {format_bytes(plan.reserved)} of free cache would go back to the device" if plan.reserved else ""
        return f"nothing is stale: there is nothing to free{cache}{later}"
    back = f" · {format_bytes(plan.reserved)} would go back to the device" if plan.reserved is not None else ""
    host = sum(action.host for action in plan.actions)
    besides = f" · {format_bytes(host)} of host memory" if host else ""
    return f"would free {format_bytes(plan.promised)}{back}{besides} · nothing has been touched{later}"


def outcome_summary(outcome: Outcome) -> str:
    """Return the sentence under a plan that has been carried out: realised against promised, before and after."""
    if not outcome.plan.promised and not outcome.realised and not outcome.extra:
        return f"nothing was stale: nothing had to be freed{_given_back(outcome)}{_host(outcome)}"
    promised = format_bytes(outcome.plan.promised)
    text = f"freed {format_bytes(outcome.realised)} of {promised} promised"
    if outcome.extra:
        text += f", and {format_bytes(outcome.extra)} more"
    text += f" · held {format_bytes(outcome.before)} → {format_bytes(outcome.after)}"
    return text + _given_back(outcome, always=True) + _host(outcome)


def _host(outcome: Outcome) -> str:
    """Return the bytes of host memory that came back, where that was asked for."""
    return f" · {format_bytes(outcome.host)} of host memory given back" if outcome.host else ""


def _given_back(outcome: Outcome, *, always: bool = False) -> str:
    """Return what became of the reserved bytes, where they are known (and, unless `always`, where they changed)."""
    if outcome.reserved is None or (outcome.reserved[0] == outcome.reserved[1] and not always):
        return ""
    return f" · reserved {format_bytes(outcome.reserved[0])} → {format_bytes(outcome.reserved[1])}"


def left_rows(outcome: Outcome, limit: int = 20) -> Iterator[str]:
    """Yield what holds the rest, in one phrase each; names that hold nothing alone, together at the end."""
    alone = [each for each in outcome.left if each[1]]
    shared = [label for label, nbytes, _ in outcome.left if not nbytes]
    for label, nbytes, what in alone[:limit]:
        yield f"{label} ({what}) {format_bytes(nbytes)}" if what else f"{label} {format_bytes(nbytes)}"
    if len(alone) > limit:
        yield f"{len(alone) - limit} more (%gpumem)"
    if shared:
        yield "and, sharing memory: " + ", ".join(shared[:limit]) + (", …" if len(shared) > limit else "")


def notes(outcome: Outcome) -> Iterator[str]:
    """Yield what did not go as planned, one sentence each."""
    yield from outcome.plan.skipped
    for label, reason in outcome.undone:
        yield f"not done: {label} ({reason})"
    for holder, nbytes in outcome.survivors:
        yield f"still alive: {format_bytes(nbytes)} promised, held by {holder}: %gpumem why shows the path"
    if outcome.interrupted:
        yield "interrupted: run %reset_gpu again to finish"


def unparked_lines(found: Unparked) -> Iterator[str]:
    """Yield what `--unpark` did, then what is still parked, one sentence each."""
    names = ", ".join(found.names)
    if found.nbytes:
        are = "is" if len(found.names) == 1 else "are"
        where = " and ".join(found.devices)
        s = "s" if found.tensors != 1 else ""
        yield f"{names} {are} back on {where}: {format_bytes(found.nbytes)}, {found.tensors} tensor{s}"
    for name, nbytes, why in found.left:
        yield f"{format_bytes(nbytes)} of {name} is still parked ({why}): %reset_gpu --unpark {name} tries again"
