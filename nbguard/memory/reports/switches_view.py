"""The switches of `%nbguard` as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.memory.reports.switches import Switches
from nbguard.render.blocks import Block, Table, TableRow
from nbguard.units import counted


def switches_blocks(switches: Switches) -> Iterator[Block]:
    """Yield each switch: its name, on or off, and the command that changes it."""
    cells = f"{counted(switches.recorded, 'cell')} recorded: {advice.HISTORY.command}"
    rows = (
        ("out-of-memory card", switches.oom_card, "" if switches.oom_card else advice.ON.command),
        ("notices", switches.notices, "" if switches.notices else advice.NOTICES_ON.command),
        ("history of cells", switches.history, cells if switches.history or switches.recorded else advice.ON.command),
        ("line after a cell", switches.cells, "" if switches.cells else advice.CELLS_ON.command),
        ("errors cleaned at once", switches.auto_clean_errors, advice.AUTO_CLEAN.command),
        ("sidebar", switches.sidebar, _audience(switches) if switches.sidebar else advice.ON.command),
    )
    yield Table(rows=tuple(TableRow(cells=(name, "on" if on else "off", hint)) for name, on, hint in rows))


def _audience(switches: Switches) -> str:
    """Return how many views of the sidebar are open, how often they are updated, and how many requests wait."""
    if not switches.views:
        return "no view is open: nothing runs"
    views = f"{counted(switches.views, 'view')} open, updated {switches.rate:.2g} times a second"
    return f"{views} · {counted(switches.jobs, 'request')} waiting" if switches.jobs else views
