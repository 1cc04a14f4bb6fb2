"""The marks of lint below cells in a real JupyterLab: there when the cell has run, gone when it is edited."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.ui.conftest import Desk
from tests.ui.looks import hosts
from tests.ui.pages import App
from tests.ui.servers import Server

CELLS = [
    "%load_ext nbguard\nimport torch\nmodel, total = torch.nn.Linear(2, 2), 0\nloader = [(torch.ones(1, 2), torch.ones(1, 2))]",
    "for x, y in loader:\n    loss = (model(x) - y).sum()\n    loss.backward()\n    total += loss",
    "done = True",
]


@pytest.mark.slow
@hosts(in_ci="lab")
def test_a_cell_has_its_findings_until_it_is_edited(desk: Desk, server: Server, app: App) -> None:
    server.set_options(openOnData=False)
    tab = desk.open(desk.notebook(server, CELLS), app)
    marks = tab.page.get_by_role("note", name="nbguard lint")
    tab.run(0)
    tab.run(1)

    expect(marks).to_have_count(1)
    mark = tab.cell(1).get_by_role("note", name="nbguard lint")
    expect(mark).to_have_text(re.compile(r"^line 4: total keeps the graph .* NBG101$"))
    expect(mark.locator("code").first).to_have_text("total")
    tab.run(2)
    tab.page.wait_for_timeout(1500)
    expect(mark).to_be_visible()

    tab.cell(1).locator(".cm-content").click(position={"x": 4, "y": 4})
    tab.page.keyboard.press("End")
    tab.page.keyboard.type("  # edited")
    expect(marks).to_have_count(0)
    tab.run(2)
    expect(mark).to_be_visible()


@pytest.mark.slow
@hosts(in_ci="lab")
def test_who_wants_no_marks_has_none(desk: Desk, server: Server, app: App) -> None:
    server.set_options(openOnData=False, lintMarks=False)
    tab = desk.open(desk.notebook(server, CELLS), app)
    tab.run(0)
    tab.run(1)
    tab.page.wait_for_timeout(2500)

    expect(tab.page.get_by_role("note", name="nbguard lint")).to_have_count(0)
