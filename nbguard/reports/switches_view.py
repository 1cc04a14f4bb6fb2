"""The switches of `%nbguard` as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.render.blocks import Block, Table, TableRow
from nbguard.reports.switches import Switches
from nbguard.units import counted


def switches_blocks(switches: Switches) -> Iterator[Block]:
    """Yield each switch: its name, on or off, and the command that changes it."""
    cells = f"{counted(switches.recorded, 'cell')} recorded: %gpumem history"
    rows = (
        ("out-of-memory card", switches.oom_card, "" if switches.oom_card else "%nbguard on"),
        ("notices", switches.notices, "" if switches.notices else "%nbguard notices on"),
        ("history of cells", switches.history, cells if switches.history or switches.recorded else "%nbguard on"),
        ("line after a cell", switches.cells, "" if switches.cells else "%gpumem cells on"),
        ("errors cleaned at once", switches.auto_clean_errors, "%nbguard on --auto-clean-errors"),
        ("sidebar", switches.sidebar, _audience(switches) if switches.sidebar else "%nbguard on"),
    )
    yield Table(rows=tuple(TableRow(cells=(name, "on" if on else "off", hint)) for name, on, hint in rows))


def _audience(switches: Switches) -> str:
    """Return how many views of the sidebar are open, how often they are updated, and how many requests wait."""
    if not switches.views:
        return "no view is open: nothing runs"
    views = f"{counted(switches.views, 'view')} open, updated {switches.rate:.2g} times a second"
    return f"{views} · {counted(switches.jobs, 'request')} waiting" if switches.jobs else views
