"""Snapshot files: what was written, what one says, what changed between two. As text and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nbguard.memory.recording import ENTRY_BYTES, Recording
from nbguard.render.blocks_text import aligned
from nbguard.render.elements import bar, columns, head_line, listed, page, pools, table_row
from nbguard.render.ledger import signed
from nbguard.render.rows import holder_rows, pool_table
from nbguard.reports.report import DeviceReport
from nbguard.snapshots.diff import DeviceDiff, SizeChange, SnapshotDiff
from nbguard.snapshots.report import SnapshotReport
from nbguard.snapshots.save import SnapshotFiles
from nbguard.units import format_bytes, format_column, unit_of

_SHOWN = 12
_FIGURES = (1, 2, 3)
_HOLDERS = ("held by", "bytes", "what")


def recording_text(found: Recording) -> str:
    """Return what is recorded of the allocator, and what to do with it."""
    entries = f"{found.entries or 0:,}"
    match found.state:
        case "on":
            since = "" if found.changed or found.since is None else f" since In[{found.since}]"
            what = f"recording{since}: the allocator's last {entries} entries by device, with the line of each allocation"
        case "waiting":
            what = f"recording begins with the first use of CUDA: the allocator's last {entries} entries by device"
        case "theirs":
            return (
                "PyTorch's history is recorded, and not by nbguard: it is left as it is. %gpumem snapshot and %gpumem whatif "
                "use it; torch.cuda.memory._record_memory_history(None) ends it"
            )
        case "off":
            return "recording is off, and its history forgotten" if found.changed else "nothing is being recorded"
    cost = f"  some 2 µs an allocation, and up to {format_bytes((found.entries or 0) * ENTRY_BYTES)} of host memory per device"
    return f"{what}\n{cost}\n  %gpumem whatif replays it · %gpumem snapshot FILE keeps it · %gpumem record off ends it"


def recording_html(found: Recording) -> str:
    """Return the same as HTML."""
    return page("".join(f"<div>{escape(line)}</div>" for line in recording_text(found).splitlines()))


def written_text(found: SnapshotFiles) -> str:
    """Return what was written."""
    return "\n".join(_written(found))


def _written(found: SnapshotFiles) -> Iterator[str]:
    parts = f"{_count(found.segments, 'segment')}, {_count(found.events, 'entry')} of history"
    yield f"{found.path}  {format_bytes(found.nbytes)}: {parts}"
    left = f"; {_count(found.unnamed, 'small holder')} had no room" if found.unnamed else ""
    said = f"version, settings, sizes, {_count(found.holders, 'holder')}{left}"
    yield f"  pytorch.org/memory_viz opens it; beside it {found.beside}: {said}"
    if not found.events:
        yield "  no history was recorded, so it cannot be replayed: %gpumem record on, before the cells in question"


def _count(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what[:-1]}ies" if what.endswith("y") else f"{number:,} {what}s"


def written_html(found: SnapshotFiles) -> str:
    """Return the same as HTML."""
    return page("".join(f"<div>{escape(line)}</div>" for line in _written(found)))


def saved_text(found: SnapshotReport, limit: int = _SHOWN) -> str:
    """Return the report on a snapshot file; at most `limit` holders per device."""
    lines = [_origin(found)]
    for device in found.report.devices:
        pools = pool_table(device)
        lines += ["", f"{device.device}  {device.name}".rstrip(), f"  {_parts(device)}", ""]
        lines += aligned([_HOLDERS, *_holders(device, limit)], figures=(1,))
        lines += ["", *aligned(pools, figures=range(1, len(pools[0])))] if pools else []
    return "\n".join([*lines, *(f"  ○ {note}" for note in found.notes)])


def saved_html(found: SnapshotReport, limit: int = _SHOWN) -> str:
    """Return the same as HTML."""
    body = f'<div class="dim">{escape(_origin(found))}</div>'
    for device in found.report.devices:
        rows = [table_row(*map(escape, cells), numbers=(1,)) for cells in _holders(device, limit)[:-1]]
        rows.append(table_row(*_holders(device, limit)[-1], numbers=(1,), row='tr class="sum"'))
        size = "" if device.total is None else f"of {format_bytes(device.total)}"
        body += head_line(device.device, device.name, size) + bar(device, _parts(device))
        body += columns(_HOLDERS, (1,), "".join(rows)) + pools(device)
    return page(body + listed(found.notes))


def _parts(device: DeviceReport) -> str:
    unit = unit_of(sum(part.nbytes for part in device.parts))
    figures = format_column([part.nbytes for part in device.parts], unit)
    return "   ".join(f"{part.name} {figure}" for part, figure in zip(device.parts, figures, strict=True))


def _holders(device: DeviceReport, limit: int) -> list[tuple[str, str, str]]:
    """Return at most `limit` holders, the rest in one row, and the total: the figures re-add."""
    rows, total = holder_rows(device, limit)
    return [*((row.name, row.retained, row.what) for row in rows), ("", total, "allocated")]


def _origin(found: SnapshotReport) -> str:
    version = "PyTorch's version is not known" if found.torch_version is None else f"PyTorch {found.torch_version}"
    settings = "settings are not known" if found.settings is None else found.settings or "default settings"
    return f"{found.file} · {version} · {settings} · {_count(sum(found.events), 'entry')} of history"


def diff_text(found: SnapshotDiff, limit: int = _SHOWN) -> str:
    """Return what changed between two files; at most `limit` rows of a table."""
    lines = [f"{found.before} → {found.after}"]
    for device in found.devices:
        lines += ["", *_diff_lines(device, limit)]
    return "\n".join([*lines, *(f"  ○ {note}" for note in found.notes)])


def _diff_lines(device: DeviceDiff, limit: int) -> Iterator[str]:
    yield f"{device.device}  {_summary(device)}"
    for what, rows, total in (("holder", device.holders, device.allocated), ("pool", device.pools, device.reserved)):
        if not rows:
            yield f"  no {what} has changed"
            continue
        table = [(what, "change", "before", "after"), *_cells(rows, total, limit)]
        yield from aligned(table, figures=_FIGURES)


def _summary(device: DeviceDiff) -> str:
    each = (f"{row.label} {signed(row.grown)} → {format_bytes(row.after)}" for row in (device.allocated, device.reserved))
    return " · ".join(each)


def _fewer(rows: Sequence[SizeChange], limit: int) -> list[SizeChange]:
    """Return at most `limit` rows, and the rest in one: the column re-adds."""
    rest = rows[limit:]
    if len(rest) < 2:
        return list(rows)
    before, after = sum(row.before for row in rest), sum(row.after for row in rest)
    return [*rows[:limit], SizeChange(f"{len(rest)} more", before, after, after - before)]


def _cells(rows: Sequence[SizeChange], total: SizeChange, limit: int) -> list[tuple[str, str, str, str]]:
    """Return a table's rows and its total in one unit: the figures shown re-add down each column."""
    shown = _fewer(rows, limit)
    unit = unit_of(max((max(row.before, row.after) for row in (*shown, total)), default=0))
    columns = []
    for name in ("grown", "before", "after"):
        values = [getattr(row, name) for row in shown]
        same = getattr(total, name) - sum(values)  # what is as it was is in the total, and in no row
        figures = [*format_column([*values, same], unit)[:-1], *format_column([getattr(total, name)], unit)]
        columns.append([_signed(figure) for figure in figures] if name == "grown" else figures)
    return list(zip([*(row.label for row in shown), total.label], *columns, strict=True))


def _signed(figure: str) -> str:
    return figure.replace("-", "−") if figure.startswith("-") else f"+{figure}"


def diff_html(found: SnapshotDiff, limit: int = _SHOWN) -> str:
    """Return the same as HTML."""
    body = ""
    for device in found.devices:
        body += head_line(device.device, f"{found.before} → {found.after}", escape(_summary(device)))
        for what, rows, total in (("holder", device.holders, device.allocated), ("pool", device.pools, device.reserved)):
            *table, last = _cells(rows, total, limit)
            cells = "".join(table_row(*map(escape, row), numbers=_FIGURES) for row in table)
            cells += table_row(*map(escape, last), numbers=_FIGURES, row='tr class="sum"')
            body += columns((what, "change", "before", "after"), _FIGURES, cells)
    return page(body + listed(found.notes))
