"""Reloads, restarts, deaths, several notebooks and tabs: the panel shows what is, and leaves nothing behind in the kernel."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from tests.kernels import wait_until
from tests.thorough import left_out_by_ci
from tests.ui.cells import BUSY, LOAD, STOP_FILE
from tests.ui.conftest import Desk
from tests.ui.looks import both_hosts, hosts, lab_only
from tests.ui.pages import App, Notebook, Tab
from tests.ui.servers import Server

HOLD = "import torch; {} = torch.ones({} << 18)"
"""A tensor of so many MiB under a name."""
DIE = "import os; os._exit(1)"


def holding(desk: Desk, server: Server, name: str, cells: list[str] | None = None) -> Notebook:
    """Return a notebook with nbguard loaded and 8 MiB held under a name."""
    notebook = desk.notebook(server, cells or [])
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run(HOLD.format(name, 8)).ok()
    return notebook


def expect_holder(tab: Tab, name: str) -> None:
    expect(tab.button(f"why {name}")).to_be_visible()


@left_out_by_ci
@both_hosts
def test_reload_idle(desk: Desk, server: Server) -> None:
    notebook = holding(desk, server, "weights")
    tab = desk.open(notebook)
    expect_holder(tab, "weights")
    threads = notebook.kernel.resting_threads()
    for _ in range(2):
        tab.reload()
        expect_holder(tab, "weights")
        tab.wait_for_ticks(2)
    assert notebook.kernel.resting_threads() == threads


@pytest.mark.slow
@lab_only
def test_after_a_reload_the_panel_is_there_before_the_notebook(desk: Desk, server: Server) -> None:
    """The notebook's file is held back: nothing of what the panel shows waits for it, and one link serves before and after.

    In JupyterLab: Notebook 7 shows nothing at its sides before.
    """
    notebook = holding(desk, server, "weights", ["'the cell'"])
    tab = desk.open(notebook)
    expect_holder(tab, "weights")
    held: list[Route] = []
    tab.page.route(re.compile(rf"/api/contents/{notebook.name}\?.*content=1"), lambda route: held.append(route))
    tab.page.reload(wait_until="commit")
    expect_holder(tab, "weights")
    tab.wait_for_ticks(2)
    expect(tab.panel.get_by_role("heading", level=2)).to_have_text(notebook.name)
    wait_until(lambda: tab.tick() >= 0 and held, "the notebook to be opened")
    tab.wait_for_ticks(2)
    assert tab.page.get_by_text("'the cell'").count() == 0
    tab.page.evaluate("() => { window.view = document.querySelector('.nbguard-view'); }")
    for route in held:
        route.continue_()
    tab.page.unroute_all()
    tab.wait_until_connected()
    tab.wait_for_ticks(2)
    assert tab.page.evaluate("() => window.view === document.querySelector('.nbguard-view')"), "another link was made"


@pytest.mark.slow
def test_reload_while_a_cell_runs(desk: Desk, server: Server) -> None:
    notebook = holding(desk, server, "weights", [BUSY])
    tab = desk.open(notebook)
    tab.wait_for_ticks()
    threads = notebook.kernel.resting_threads()
    tab.start(0)
    tab.page.reload()
    expect_holder(tab, "weights")
    tab.wait_for_ticks(2)
    with tab.asked() as after:
        tab.button("release… weights").click()
        after("ack")
    notebook.file(STOP_FILE).touch()
    assert notebook.kernel.resting_threads() == threads


@pytest.mark.slow
@hosts(in_ci="notebook")  # in JupyterLab in test_access.py, test_story.py and, with nbguard loaded anew, test_load.py
def test_restart(desk: Desk, server: Server, app: App) -> None:
    notebook = holding(desk, server, "weights", [LOAD, HOLD.format("later", 4)])
    tab = desk.open(notebook, app)
    expect_holder(tab, "weights")
    server.ask("POST", f"api/kernels/{notebook.id}/restart")
    expect(tab.panel).to_contain_text("not loaded", use_inner_text=True)
    expect(tab.button("why weights")).to_be_hidden()
    tab.run(0)
    tab.run(1)
    expect_holder(tab, "later")


@left_out_by_ci
def test_death(desk: Desk, server: Server) -> None:
    """The server starts a kernel that has died again: without nbguard, and without what it held."""
    notebook = holding(desk, server, "weights", [DIE])
    tab = desk.open(notebook)
    expect_holder(tab, "weights")
    tab.start(0)
    expect(tab.button("why weights")).to_be_hidden()
    expect(tab.panel).to_contain_text("not loaded", use_inner_text=True, timeout=60_000)


@left_out_by_ci
def test_load_by_button(desk: Desk, server: Server) -> None:
    notebook = desk.notebook(server, [HOLD.format("weights", 8), BUSY])
    tab = desk.open(notebook)
    tab.show_panel()
    expect(tab.panel).to_contain_text("not loaded", use_inner_text=True)
    tab.start(1)
    tab.button("Load nbguard").click()
    expect(tab.panel).to_contain_text("It loads when the cell ends.", use_inner_text=True)
    notebook.file(STOP_FILE).touch()
    tab.wait_for_ticks()
    tab.run(0)
    expect_holder(tab, "weights")
    assert notebook.kernel.value("get_ipython().execution_count") == 3, "loading took a number from the user's cells"


@pytest.mark.slow
@lab_only
def test_two_notebooks(desk: Desk, server: Server) -> None:
    first, second = holding(desk, server, "alpha"), holding(desk, server, "beta")
    tab = desk.open(first)
    expect_holder(tab, "alpha")
    tab.show(second)
    expect_holder(tab, "beta")
    expect(tab.button("why alpha")).to_be_hidden()
    tab.show(first)
    expect_holder(tab, "alpha")
    tab.wait_for_ticks(2)


@lab_only
@left_out_by_ci
def test_notebook_closed(desk: Desk, server: Server) -> None:
    notebook = holding(desk, server, "weights")
    tab = desk.open(notebook)
    tab.wait_for_ticks()
    tab.page.evaluate("() => jupyterapp.shell.currentWidget.dispose()")
    expect(tab.panel).to_contain_text("No kernel to look at", use_inner_text=True)


@left_out_by_ci
def test_two_tabs_on_one_kernel(desk: Desk, server: Server) -> None:
    notebook = holding(desk, server, "weights")
    one, other = desk.open(notebook), desk.open(notebook)
    for tab in (one, other):
        expect_holder(tab, "weights")
        tab.wait_for_ticks(2)
    one.button("release… weights").click()
    expect(one.heading(re.compile("plan"))).to_be_visible()
    other.wait_for_ticks(2)
    expect(other.heading(re.compile("plan"))).to_be_hidden()
    one.page.close()
    other.wait_for_ticks(4)
    threads = notebook.kernel.threads()
    assert len(threads) == len(set(threads)), threads


@pytest.mark.slow
def test_nobody_looks(desk: Desk, server: Server) -> None:
    """Without a view the kernel is as it was: its sampler has ended."""
    server.set_options(statusBar=False)  # its item looks, too: test_status.py
    notebook = holding(desk, server, "weights")
    before = notebook.kernel.resting_threads()
    tab = desk.open(notebook)
    tab.wait_for_ticks(2)
    assert notebook.kernel.resting_threads() != before
    tab.hide_panel()
    wait_until(lambda: notebook.kernel.threads() == before, "the sampler to end", within=60)


@pytest.mark.slow
def test_server_under_a_prefix(desk: Desk, prefixed_server: Server) -> None:
    notebook = holding(desk, prefixed_server, "weights")
    tab = desk.open(notebook)
    expect_holder(tab, "weights")
    tab.wait_for_ticks(2)


@pytest.mark.slow
def test_the_card_goes_when_its_cell_runs_through(desk: Desk, fake_cuda_server: Server) -> None:
    """Another cell that ends well says nothing about it."""
    notebook = desk.notebook(fake_cuda_server, ["x = torch.empty(size, device='cuda')", "pass"], "fake-cuda")
    for cell in (LOAD, "import torch; size = 2**33"):
        notebook.kernel.run(cell).ok()
    tab = desk.open(notebook)
    tab.show_panel()
    tab.run(0)
    card = tab.heading(re.compile("Out of memory"))
    expect(card).to_be_visible()
    tab.run(1)
    tab.wait_for_ticks(4)
    expect(card).to_be_visible()
    notebook.kernel.run("size = 2").ok()
    tab.run(0)
    expect(card).to_be_hidden()
