"""The panel while a cell runs: it lives, what is clicked is handled, and nothing of the fit is touched."""

from __future__ import annotations

import math
import os
import re
import statistics
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.ui.cells import ACCIDENTS, ALIVE, FIT, LOAD, STOP_FILE, prelude
from tests.ui.conftest import Desk
from tests.ui.pages import Tab
from tests.ui.servers import Server

WAITS = "runs when the cell ends"
HANDLED_MS = 250
"""The promise. The fastest of some clicks is held to it: others also wait for what else this machine does."""
SLOWEST_MS = 600
"""Two ticks a second, and what it takes to draw one: half of them are to be no further apart."""
CLICKS = 4, 12
"""At least and at most so many."""

GIL = "import ctypes, os; ctypes.PyDLL(None).read(os.open('told', os.O_RDWR), ctypes.create_string_buffer(1), 1)"
"""One native call that never lets go of the GIL until it is told: unlike several, it leaves no gap for a tick."""


@pytest.fixture
def training(desk: Desk, server: Server) -> Tab:
    """A tab in which `learn.fit` runs and the panel shows it."""
    return _train(desk, server)


@pytest.fixture
def training_by_shell(desk: Desk, server: Server) -> Tab:
    """The same, where the panel speaks to the kernel like a cell does."""
    server.set_options(channel="shell")
    return _train(desk, server)


def _train(desk: Desk, server: Server) -> Tab:
    notebook = desk.notebook(server, [FIT])
    notebook.kernel.run(LOAD).ok()
    for cell in (prelude(), *ACCIDENTS):
        notebook.kernel.run(cell, stop_on_error=False)
    tab = desk.open(notebook)
    tab.wait_for_ticks()
    tab.start(0)
    expect(tab.heading("Fit")).to_be_visible()
    return tab


def stop(tab: Tab) -> None:
    """Let the fit end, and see that it went well."""
    tab.notebook.file(STOP_FILE).touch()
    tab.wait_for_end(0)
    assert (
        tab.cell(0)
        .locator('[data-mime-type="application/vnd.jupyter.error"], .jp-RenderedText[data-mime-type*=stderr]')
        .count()
        == 0
    )


@pytest.mark.slow
def test_while_a_fit_trains(training: Tab) -> None:
    """It ticks, handles clicks, cleans up beside the fit, and waits with what the fit needs: one after the other."""
    expect_ticks(training)
    expect_clicks_to_be_handled(training)
    expect_a_cleanup_beside_the_fit(training)
    training.notebook.file(STOP_FILE).unlink()
    training.start(0)
    expect(training.heading("Fit")).to_be_visible()
    expect(training.heading("Just done")).to_be_hidden()
    expect_the_training_learner_to_wait(training)


def expect_ticks(training: Tab) -> None:
    times = training.times(seconds=4)
    assert training.prompt(0) == "[*]:"
    assert len(times) > 2
    assert statistics.median(later - earlier for earlier, later in pairwise(times)) <= SLOWEST_MS, times
    fit = training.part("Fit")
    expect(fit).to_contain_text(re.compile(r"epoch \d+ of 100,?000"))
    before = fit.inner_text()
    wait_until(lambda: fit.inner_text() != before, "the fit's progress")


def expect_clicks_to_be_handled(training: Tab) -> None:
    handled: list[float] = []
    least, most = CLICKS
    while len(handled) < least or (min(handled) >= HANDLED_MS and len(handled) < most):
        with training.asked() as after:
            training.button("release… losses").click()
            handled.append(after("ack"))
        assert training.prompt(0) == "[*]:"
        expect(training.heading("Release losses: the plan")).to_be_visible()
        training.button("Cancel").click()
        expect(training.heading("Release losses: the plan")).to_be_hidden()
    assert min(handled) < HANDLED_MS, handled


def expect_a_cleanup_beside_the_fit(training: Tab) -> None:
    """What the last error and a displayed result hold goes beside the fit; the Learner that trains is not touched."""
    training.button(re.compile("^Clean stale · ")).click()
    training.button(re.compile("^Free ")).click()
    expect(training.heading("Just done")).to_be_visible()
    assert training.prompt(0) == "[*]:"
    fit = training.part("Fit").inner_text()
    wait_until(lambda: training.part("Fit").inner_text() != fit, "the fit to go on")
    stop(training)
    expect(training.heading("Fit")).to_be_hidden()
    assert training.notebook.kernel.value(ALIVE) == [0, 0]
    losses = training.notebook.kernel.value("[loss.item() for loss in learn.recorder.losses]")
    assert losses
    assert all(map(math.isfinite, losses))


def expect_the_training_learner_to_wait(training: Tab) -> None:
    """Asked to let go what trains, nbguard waits: the fit goes on as if nobody had asked."""
    training.button("release… learn").first.click()
    waits = re.compile("Nothing has been done yet.*when the cell ends")
    expect(training.part("Release learn: the plan")).to_contain_text(waits)
    training.button("Release learn").click()
    expect(training.panel.get_by_text(re.compile("when the cell ends")).first).to_be_visible()
    training.wait_for_ticks(8)
    assert training.prompt(0) == "[*]:"
    expect(training.heading("Fit")).to_be_visible()
    stop(training)
    expect(training.heading("Just done")).to_be_visible()
    assert training.notebook.kernel.value("'learn' in dir()") is False


@pytest.mark.slow
def test_without_control_channel_it_runs_when_the_cell_ends(training_by_shell: Tab) -> None:
    tab = training_by_shell
    tab.button("release… losses").click()
    expect(tab.panel).to_contain_text(WAITS, use_inner_text=True)
    assert tab.prompt(0) == "[*]:"
    expect(tab.heading(re.compile("plan"))).to_be_hidden()
    stop(tab)
    expect(tab.heading(re.compile("plan"))).to_be_visible()
    expect(tab.panel).not_to_contain_text(WAITS, use_inner_text=True)


@pytest.mark.slow
def test_a_native_call_that_keeps_the_gil(desk: Desk, plain_server: Server) -> None:
    notebook = desk.notebook(plain_server, [LOAD, GIL], "plain")
    tab = desk.open(notebook)
    tab.run(0)
    tab.wait_for_ticks()
    pipe = notebook.file("told")
    os.mkfifo(pipe)
    tab.start(1)
    expect(tab.panel).to_contain_text("kernel not responding", use_inner_text=True)
    pipe.write_bytes(b"!")
    pipe.unlink()
    tab.wait_for_end(1)
    tab.wait_for_ticks(2)
    expect(tab.panel).not_to_contain_text("kernel not responding", use_inner_text=True)


@pytest.mark.slow
def test_the_next_fit_of_an_idle_learner_is_predicted_on_a_click(desk: Desk, server: Server) -> None:
    """Nothing of it runs, no second click is needed, and the figure goes with the state that it was predicted of."""
    notebook = desk.notebook(server, ["more = torch.zeros(1 << 20)"])
    for cell in (LOAD, prelude()):
        notebook.kernel.run(cell).ok()
    tab = desk.open(notebook)
    tab.wait_for_ticks()
    needed = tab.panel.get_by_text(re.compile(r"the next fit needs \d"))
    expect(needed).to_have_count(0)

    tab.button("next fit learn").click()
    expect(needed).to_be_visible(timeout=60_000)
    assert notebook.kernel.value("learn.opt is None") is True
    tab.run(0)
    expect(needed).to_have_count(0)
