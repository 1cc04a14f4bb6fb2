"""The slider of `%gpumem map --history` in a real page: moved by keyboard, pressed, and kept as a picture."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.ui.axe import view_findings
from tests.ui.conftest import Desk
from tests.ui.looks import hosts
from tests.ui.pages import App
from tests.ui.servers import Server
from tests.ui.test_saved import saved_picture

CELLS = [
    "%load_ext nbguard\nimport torch",
    "%gpumem simulate 64MiB",
    "%gpumem record on",
    "gone = torch.empty(4 << 20)",
    "kept = torch.empty(1 << 20)",
    "del gone",
    "%gpumem map --history",
]
LAST = len(CELLS) - 1


@pytest.mark.slow
@hosts(in_ci="lab")
def test_the_slider_moves_through_the_history(desk: Desk, server: Server, app: App) -> None:
    server.set_options(openOnData=False)
    notebook = desk.notebook(server, CELLS)
    tab = desk.open(notebook, app)
    for number in range(len(CELLS)):
        tab.run(number)
    output = tab.cell(LAST).locator(".jp-OutputArea-child")
    slider = output.get_by_role("slider", name="Event of the history")

    expect(output.get_by_text("The peak was here, 20 MiB")).to_be_visible()
    at_the_peak = slider.get_attribute("aria-valuetext") or ""
    assert re.fullmatch(r"event \d of \d", at_the_peak)
    slider.focus()
    tab.page.keyboard.press("Home")
    expect(output.get_by_text("This is the state before the first recorded event")).to_be_visible()
    assert (slider.get_attribute("aria-valuetext") or "").startswith("event 0 of")
    tab.page.keyboard.press("End")
    expect(output.get_by_text(re.compile("4 MiB more than here|16 MiB more than here")).first).to_be_visible()
    output.get_by_role("button", name="peak").click()
    expect(output.get_by_text("The peak was here, 20 MiB")).to_be_visible()
    assert slider.get_attribute("aria-valuetext") == at_the_peak

    tab.run(LAST)  # a later slider; there is one to an output
    expect(slider).to_have_count(1)
    tab.execute("docmanager:save")
    wait_until(lambda: "The peak was here" in saved_picture(notebook), "the notebook to be saved")
    server.ask("POST", f"api/kernels/{notebook.id}/restart")
    tab.reload()
    expect(output.get_by_text("The peak was here, 20 MiB")).to_be_visible()
    expect(output.get_by_text("Error displaying widget")).to_have_count(0)
    expect(slider).to_have_count(0)


@pytest.mark.slow
@hosts(in_ci="lab")
def test_the_panel_has_the_same_moments(desk: Desk, server: Server, app: App) -> None:
    notebook = desk.notebook(server, CELLS[:-1])
    tab = desk.open(notebook, app)
    for number in range(LAST):
        tab.run(number)
    tab.show_panel()
    slider = tab.panel.get_by_role("slider", name="Event of the history")

    tab.button("show the history").click()
    expect(tab.panel.get_by_text("The peak was here, 20 MiB")).to_be_visible()
    expect(tab.panel.get_by_role("button", name="First refusal")).to_be_hidden()
    slider.focus()
    tab.page.keyboard.press("Home")
    expect(tab.panel.get_by_text("This is the state before the first recorded event")).to_be_visible()
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"event 0 of \d"))
    tab.page.keyboard.press("End")
    expect(tab.panel.get_by_text("The peak was 20 MiB after event")).to_be_visible()
    assert view_findings(tab.page) == []
