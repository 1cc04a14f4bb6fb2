"""The panel's header and the status bar: whose memory it is, how full the device is, and what that costs."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from playwright.sync_api import Locator, expect

from tests.kernels import wait_until
from tests.ui.axe import view_findings
from tests.ui.cells import BUSY, LOAD, STOP_FILE
from tests.ui.conftest import Desk
from tests.ui.looks import hosts, lab_only
from tests.ui.pages import App, Tab
from tests.ui.servers import Server

HOLD = "import torch; weights = torch.ones(256 << 18, device='cuda')"


def status(tab: Tab) -> Locator:
    return tab.page.locator(".nbguard-status-item button")


@pytest.mark.slow
@lab_only
def test_the_status_bar_shows_how_full_the_device_is_and_opens_the_panel(desk: Desk, fake_cuda_server: Server) -> None:
    server = fake_cuda_server
    server.set_options(openOnData=False)
    plain = desk.notebook(server, [], "fake-cuda")
    notebook = desk.notebook(server, [LOAD, HOLD], "fake-cuda")
    tab = desk.open(notebook)
    expect(status(tab)).to_be_hidden()
    tab.run(0)
    tab.run(1)
    expect(status(tab)).to_have_text(re.compile(r"^cuda:0 0\.\d+ / 8 GiB$"))
    expect(tab.panel).to_be_hidden()
    notebook.kernel.run("more = torch.ones(3 << 28, device='cuda')").ok()
    expect(status(tab)).to_have_text(re.compile(r"^cuda:0 3(\.\d+)? / 8 GiB$"))
    status(tab).click()
    expect(tab.panel).to_be_visible()
    tab.wait_for_ticks(2)
    assert view_findings(tab.page) == []
    tab.show(plain)
    expect(status(tab)).to_be_hidden()


@pytest.mark.slow
@lab_only
def test_a_status_bar_alone_is_a_tick_now_and_then_and_no_scan(desk: Desk, server: Server) -> None:
    server.set_options(openOnData=False, lintMarks=False)
    notebook = desk.notebook(server, [])
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run("import torch; weights = torch.ones(8 << 18)").ok()
    tab = desk.open(notebook)
    expect(status(tab)).to_be_visible()
    tab.page.evaluate("() => recorder.reset()")
    notebook.kernel.run("more = torch.ones(8 << 18)").ok()

    def sent() -> list[float]:
        """Return when the kernel has sent ticks; a page that is busy may hear of two at once."""
        return sorted({frame["sent"] for frame in tab.frames() if frame["op"] == "tick"})

    wait_until(lambda: len(sent()) >= 3, "ticks", within=60)
    assert {frame["op"] for frame in tab.frames()} == {"tick"}, "a scan was made for a status bar"
    times = sent()
    assert min(later - earlier for earlier, later in pairwise(times)) > 2, times


def y(tab: Tab) -> float:
    """Return the distance of the list of holders from the page's top, in pixels."""
    box = tab.part("Held by").bounding_box()
    assert box
    return box["y"]


@pytest.mark.slow
@hosts(in_ci="lab")
def test_the_header_names_the_notebook_and_keeps_its_height(desk: Desk, server: Server, app: App) -> None:
    notebook = desk.notebook(server, [BUSY])
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run("import torch; weights = torch.ones(8 << 18)").ok()
    tab = desk.open(notebook, app)
    tab.wait_for_ticks()
    title = tab.panel.get_by_role("heading", level=2)
    expect(title).to_have_text(notebook.name)
    top = y(tab)
    tab.start(0)
    expect(tab.panel.locator(".nbguard-status")).to_contain_text("runs")
    assert y(tab) == top, "the header's height has changed"
    notebook.file(STOP_FILE).touch()
    tab.wait_for_end(0)
    renamed = f"renamed-{notebook.name}"
    tab.page.evaluate("name => jupyterapp.shell.currentWidget.context.rename(name)", renamed)
    expect(title).to_have_text(renamed)


@pytest.mark.slow
@hosts(in_ci="notebook")
def test_a_click_on_a_holder_goes_to_its_cell(desk: Desk, server: Server, app: App) -> None:
    cells = [LOAD, "import torch; first = torch.ones(8 << 18)", "second = torch.ones(4 << 18)", "1 + 1"]
    notebook = desk.notebook(server, cells)
    tab = desk.open(notebook, app)
    for number in range(4):
        tab.run(number)
    tab.wait_for_ticks()
    tab.button("go to In[2], which made first").click()
    active = "() => jupyterapp.shell.currentWidget.content.activeCellIndex"
    assert tab.page.evaluate(active) == 1
    tab.page.evaluate("() => { const { content } = jupyterapp.shell.currentWidget; content.activeCellIndex = 0; }")
    tab.button("go to In[3], which made second").click()
    assert tab.page.evaluate(active) == 2
