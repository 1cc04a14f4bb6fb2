"""The picture of a sidebar, that is, HTML that stays with a saved notebook, and needs no kernel and no script."""

from __future__ import annotations

from datetime import datetime

from nbguard.memory.reports.report import Report
from nbguard.render.html import blocks_html
from nbguard.render.markup import Html, tag

_MOMENT = "font-size:12px;color:var(--jp-ui-font-color2,#767676)"


def report_picture(report: Report, cell: int | None, t: float) -> Html:
    """Return the picture of a report. `cell` is the last one that had run, None before any; `t` in seconds since the epoch."""
    return picture(blocks_html(report.blocks(), report.label), cell, t)


def picture(body: Html, cell: int | None, t: float) -> Html:
    """Return `body` with a line that dates it."""
    when = f"{datetime.fromtimestamp(t):%Y-%m-%d %H:%M}"
    last = "" if cell is None else f" In[{cell}],"
    return tag("div", tag("p", f"The sidebar as of{last} {when}. For a live one run the cell.", style=_MOMENT), body)
