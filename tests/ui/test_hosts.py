"""The other places of the view: the panel in Notebook 7, and `nbguard.Sidebar()` in output cells."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.ui.axe import view_findings
from tests.ui.cells import BUSY, LOAD, STOP_FILE
from tests.ui.conftest import Desk
from tests.ui.looks import THEMES, WIDTHS, hosts, lab_only
from tests.ui.pages import App
from tests.ui.servers import Server

WEIGHTS = "import torch; weights = torch.ones(8 << 18)"
SIDEBAR = "import nbguard; side = nbguard.Sidebar(); side"


@pytest.mark.slow
@lab_only
def test_panel_in_notebook_7(desk: Desk, server: Server) -> None:
    notebook = desk.notebook(server, [LOAD, WEIGHTS, "3 * 14"])
    tab = desk.open(notebook, "notebook")
    tab.run(0)
    tab.run(1)
    tab.wait_for_ticks()
    tab.hide_panel()
    tab.show_panel()
    tab.wait_for_ticks(2)
    expect(tab.button("why weights")).to_be_visible()
    tab.button("release… weights").click()
    expect(tab.heading(re.compile("plan"))).to_be_visible()
    tab.hide_panel()
    tab.show_panel()
    expect(tab.heading(re.compile("plan"))).to_be_visible()
    tab.wait_for_ticks(2)
    tab.button("Cancel").click()
    tab.run(2)
    assert tab.cell(2).locator(".jp-OutputArea-output").inner_text().strip() == "42"
    for theme in THEMES:
        tab.set_theme(theme)
        for width in WIDTHS:
            tab.set_width(width)
            assert view_findings(tab.page) == [], f"{theme}, {width} px"


@pytest.mark.slow
@hosts(in_ci="notebook")
def test_widget_in_an_output_cell(desk: Desk, server: Server, app: App) -> None:
    notebook = desk.notebook(server, [SIDEBAR, BUSY])
    notebook.kernel.run(WEIGHTS).ok()
    server.set_options(openOnData=False)
    tab = desk.open(notebook, app)
    tab.run(0)
    widget = tab.cell(0).locator(".nbguard-view")
    expect(widget).to_be_visible()
    first = widget.get_attribute("data-tick")
    wait_until(lambda: widget.get_attribute("data-tick") != first, "ticks of the widget")
    widget.get_by_role("button", name="why weights").click()
    expect(widget).to_contain_text("%reset_gpu weights")
    is_handled_meanwhile = notebook.kernel.offers_subshells()
    tab.start(1)
    before = widget.get_attribute("data-tick")
    wait_until(lambda: widget.get_attribute("data-tick") != before, "ticks while a cell runs")
    widget.get_by_role("button", name="release… weights").click()
    plan = widget.get_by_role("heading", name=re.compile("plan"))
    expect(plan if is_handled_meanwhile else widget.get_by_text("runs when the cell ends")).to_be_visible()
    assert tab.prompt(1) == "[*]:"
    notebook.file(STOP_FILE).touch()
    tab.wait_for_end(1)
    expect(plan).to_be_visible()
