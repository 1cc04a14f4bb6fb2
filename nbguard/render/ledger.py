"""The ledger of cells in one line per cell, and other lines that appear under a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from nbguard.cleanup.plan.plan import Outcome
from nbguard.memory.counters import NOTICED
from nbguard.reports.cell_ledger import PROCESS, CellRecord, DeviceChange, Share
from nbguard.reports.switches import Switches
from nbguard.units import format_bytes

_NAMED = 3
_SLOW = 0.3
"""Seconds that a look may take without being mentioned."""
_STYLE = "font-size:12px;line-height:1.45;color:var(--jp-ui-font-color2,#767676);font-variant-numeric:tabular-nums"


def signed(nbytes: int) -> str:
    """Return a change of bytes with its sign: '+364.03 MiB', '−4.33 MiB', '±0 B'."""
    return f"{'+' if nbytes > 0 else '−' if nbytes else '±'}{format_bytes(abs(nbytes))}"


def line(record: CellRecord) -> str:
    """Return what a cell did to the memory in one line."""
    changed = [device for device in record.devices if device.is_changed] or list(record.devices[:1])
    many = len(record.devices) > 1
    return " · ".join([f"In[{record.cell}]  " + " · ".join(_device(device, named=many) for device in changed), *_words(record)])


def _device(device: DeviceChange, *, named: bool) -> str:
    name = f"{device.device} " if named or device.device == PROCESS else ""
    text = f"{name}{signed(device.delta)} → {format_bytes(device.after)}"
    if device.peak is not None and device.peak > max(device.before, device.after):
        text += f" · new peak {format_bytes(device.peak)}"
    if device.reserved is not None and device.reserved != device.reserved_before:
        text += f" · reserved {signed(device.reserved - (device.reserved_before or 0))} → {format_bytes(device.reserved)}"
    if device.between:
        text += f" · {signed(device.between)} before it, outside any cell"
    return text


def _words(record: CellRecord) -> Iterator[str]:
    groups = {
        "new": [share for share in record.came if share.is_new],
        "more": [share for share in record.came if not share.is_new],
        "freed": list(record.went),
        "stale": list(record.stale),
    }
    for word, shares in groups.items():
        if text := shares_text(shares):
            yield f"{word}: {text}{' (%reset_gpu)' if word == 'stale' else ''}"
    if record.unseen:
        yield f"holders: %gpumem ({record.unseen})"
    if record.seconds > _SLOW:
        yield f"looked {record.seconds:.1f} s"


def shares_text(shares: Sequence[Share]) -> str:
    """Return holders with their bytes, the largest three by name; crumbs beside a large one are not worth a word."""
    held = Counter[str]()  # on all devices together
    for share in shares:
        held[share.label] += share.nbytes
    largest = max(held.values(), default=0)
    told = [(label, nbytes) for label, nbytes in held.most_common() if nbytes * 100 >= largest or nbytes >= NOTICED]
    words = [f"{label} {format_bytes(nbytes)}" for label, nbytes in told[:_NAMED]]
    if len(told) > _NAMED:
        words.append(f"{len(told) - _NAMED} more {format_bytes(sum(nbytes for _, nbytes in told[_NAMED:]))}")
    return ", ".join(words)


def released_line(outcome: Outcome, cell: int) -> str:
    """Return what was let go after a failed cell."""
    planned = outcome.plan.actions
    collected = sum(action.nbytes or 0 for action in planned if action.kind == "collect")
    text = f"released {format_bytes(outcome.realised - collected)} that the error in In[{cell}] held (%tb, %debug still work)"
    if outcome.realised < outcome.plan.promised:
        return (
            f"released {format_bytes(outcome.realised)} of {format_bytes(outcome.plan.promised)} promised that the error in "
            f"In[{cell}] held (%tb, %debug still work): %gpumem shows who holds the rest"
        )
    return f"{text}, and {format_bytes(collected)} of unreachable cycles" if collected else text


def line_bundle(sentence: str) -> dict[str, str]:
    """Return a line as text and as small HTML, without the style sheet of a report: there is one under every cell."""
    return {"text/plain": sentence, "text/html": f'<div style="{_STYLE}">{escape(sentence)}</div>'}


def switches_rows(switches: Switches) -> list[tuple[str, str, str]]:
    """Return (what, on or off, command) of each switch."""
    cells = f"{switches.recorded} cell{'s' if switches.recorded != 1 else ''} recorded: %gpumem history"
    rows = [
        ("out-of-memory card", switches.oom_card, "" if switches.oom_card else "%nbguard on"),
        ("history of cells", switches.history, cells if switches.history or switches.recorded else "%nbguard on"),
        ("line after a cell", switches.cells, "" if switches.cells else "%gpumem cells on"),
        ("errors cleaned at once", switches.auto_clean_errors, "%nbguard on --auto-clean-errors"),
        ("sidebar", switches.sidebar, _audience(switches) if switches.sidebar else "%nbguard on"),
    ]
    return [(what, "on" if on else "off", hint) for what, on, hint in rows]


def _audience(switches: Switches) -> str:
    """Return who looks at the sidebar, how often it is told, and what it has asked for."""
    if not switches.views:
        return "nobody looks: nothing runs"
    views = f"{switches.views} view{'s look' if switches.views != 1 else ' looks'}, told {switches.rate:.2g} times a second"
    return f"{views} · {switches.jobs} waiting to be done" if switches.jobs else views


def switches_text(switches: Switches) -> str:
    """Return what is on and off as text."""
    return "\n".join(f"  {what:<24}{state:<5}{hint}".rstrip() for what, state, hint in switches_rows(switches))


def switches_html(switches: Switches) -> str:
    """Return what is on and off as HTML."""
    cell = '<td style="text-align:left">{}</td>'
    rows = "".join(f"<tr>{''.join(cell.format(escape(word)) for word in row)}</tr>" for row in switches_rows(switches))
    return f'<table aria-label="what nbguard has on and off"><tbody>{rows}</tbody></table>'
