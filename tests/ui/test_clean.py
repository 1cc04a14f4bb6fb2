"""Cleaning up with clicks: what is promised comes back, and only that."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.thorough import left_out_by_ci
from tests.ui.cells import ACCIDENTS, ALIVE, LOAD, prelude
from tests.ui.conftest import Desk
from tests.ui.looks import hosts
from tests.ui.pages import App, Tab
from tests.ui.servers import Server

SIZE = r"([\d.,]+ (?:B|[KMG]iB))"


def after_the_accidents(desk: Desk, server: Server, *more: str, app: App | None = None) -> Tab:
    """Return a tab whose notebook has had the accidents and whose panel shows them."""
    notebook = desk.notebook(server, ["learn.fit(1)", *more])
    notebook.kernel.run(LOAD).ok()
    for cell in (prelude(), *ACCIDENTS):
        notebook.kernel.run(cell, stop_on_error=False)
    assert min(notebook.kernel.value(ALIVE)) > 0
    tab = desk.open(notebook, app)
    expect(tab.button(re.compile("^Clean stale · "))).to_be_visible()
    return tab


@pytest.mark.slow
@hosts(in_ci="notebook")  # by keyboard in JupyterLab, in test_access.py
def test_clean_stale(desk: Desk, server: Server, app: App) -> None:
    tab = after_the_accidents(desk, server, app=app)
    clean = tab.button(re.compile("^Clean stale · "))
    expect(clean).to_be_visible()
    offered = re.search(SIZE, clean.inner_text())
    clean.click()
    expect(tab.heading("Clean stale: the plan")).to_be_visible()
    plan = tab.part("Clean stale: the plan")
    expect(plan).to_contain_text("last error")
    confirm = plan.get_by_role("button", name=re.compile("^Free "))
    promised = re.search(SIZE, confirm.inner_text())
    assert promised
    assert offered
    assert promised[1] == offered[1]
    confirm.click()
    expect(tab.heading("Just done")).to_be_visible()
    done = tab.part("Just done")
    expect(done).to_contain_text(promised[1])
    kernel = tab.notebook.kernel
    assert kernel.value(ALIVE) == [0, 0]
    assert kernel.value("[len(losses), losses[0].grad_fn is not None]") == [12, True]
    expect(tab.button(re.compile("^Clean stale · "))).to_be_hidden()
    tab.run(0)
    assert kernel.value("[learn.epoch, bool(learn.recorder.losses)]") == [0, True]


@left_out_by_ci
def test_what_is_yours_goes_when_you_name_it(desk: Desk, server: Server) -> None:
    tab = after_the_accidents(desk, server)
    tab.button("why losses").click()
    expect(tab.panel).to_contain_text("%reset_gpu losses", use_inner_text=True)
    tab.button("release… losses").click()
    tab.button("Release losses").click()
    expect(tab.heading("Just done")).to_be_visible()
    assert tab.notebook.kernel.value("'losses' in dir()") is False
    assert min(tab.notebook.kernel.value(ALIVE)) > 0, "what was not asked for is gone"


@left_out_by_ci
def test_cancel_changes_nothing(desk: Desk, server: Server) -> None:
    tab = after_the_accidents(desk, server)
    before = tab.notebook.kernel.value(ALIVE)
    tab.button(re.compile("^Clean stale")).click()
    tab.button("Cancel").click()
    expect(tab.heading("Clean stale: the plan")).to_be_hidden()
    assert tab.notebook.kernel.value(ALIVE) == before


@pytest.mark.slow
def test_park_and_undo(desk: Desk, fake_cuda_server: Server) -> None:
    notebook = desk.notebook(fake_cuda_server, [], "fake-cuda")
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run("import torch; net = torch.nn.Linear(1024, 4096).cuda()").ok()
    tab = desk.open(notebook)
    tab.wait_for_ticks()
    tab.button("park net").click()
    tab.button(re.compile("^Park")).last.click()
    expect(tab.heading("Just done")).to_be_visible()
    assert notebook.kernel.value("[net.weight.device.type, torch.cuda.memory_allocated()]") == ["cpu", 0]
    tab.button("undo").click()
    confirm = tab.panel.get_by_role("button", name=re.compile("^Unpark|^Bring")).first
    confirm.click()
    expect(confirm).to_be_hidden()
    expect(tab.part("Just done")).to_contain_text("Brought")
    assert notebook.kernel.value("net.weight.device.type") == "cuda"
