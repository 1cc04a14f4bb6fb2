"""The pictures of the README: NBGUARD_PICTURES=docs/pictures make test ARGS='-k pictures' takes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, expect

from tests.kernels import wait_until
from tests.thorough import left_out_by_ci
from tests.ui.cells import ACCIDENTS, FIT, LOAD, STOP_FILE, prelude
from tests.ui.conftest import Desk
from tests.ui.looks import Look
from tests.ui.pages import Tab
from tests.ui.servers import ROOT, Server

BYTES = 150_000
WIDTH = 340
DEMO = ROOT / "notebooks" / "01_between_experiments.ipynb"
REPORTED = 12
"""Number of the demo's cell whose report the README shows."""
OOM = "bigger = torch.empty(3 << 28, device='cuda'); batch = torch.empty(5 << 28, device='cuda')"


@pytest.fixture
def sharp_desk(browser: Browser) -> Iterator[Desk]:
    """A desk whose screen has twice as many pixels to the inch."""
    desk = Desk(browser.new_context(viewport={"width": 1280, "height": 960}, device_scale_factor=2), Look())
    yield desk
    assert desk.close() == []


def on_the_device(desk: Desk, server: Server, cells: list[str]) -> Tab:
    """Return a tab with the panel as wide as in the pictures, after the accidents on a device of 8 GiB."""
    notebook = desk.notebook(server, cells, "fake-cuda")
    notebook.kernel.run(LOAD).ok()
    for cell in (prelude("cuda", 1 << 18), "learn.fit(1)", *ACCIDENTS):
        notebook.kernel.run(cell, stop_on_error=False)
    tab = desk.open(notebook)
    tab.set_theme("JupyterLab Light")
    tab.wait_for_ticks()
    tab.set_width(WIDTH)
    tab.wait_for_ticks(8)
    return tab


def picture(tab: Tab, folder: Path, name: str) -> None:
    """Write the panel as it is drawn."""
    tab.page.mouse.move(10, 10)
    write(tab.panel, folder / f"sidebar-{name}.png")


def write(what: Locator, file: Path) -> None:
    """Write what is drawn, in 256 colours."""
    Image.open(BytesIO(what.screenshot())).quantize(256).save(file, optimize=True)
    assert file.stat().st_size < BYTES, file.name


@left_out_by_ci
def test_report(sharp_desk: Desk, server: Server, pictures: Path) -> None:
    import nbformat  # here: see `pytest_collection_modifyitems`

    server.set_options(openOnData=False)
    code = [cell.source for cell in nbformat.read(DEMO, as_version=4).cells if cell.cell_type == "code"][:REPORTED]
    tab = sharp_desk.open(sharp_desk.notebook(server, code))
    for number in range(len(code)):
        tab.run(number)
    report = tab.cell(REPORTED - 1).locator(".nbguard")
    expect(report).to_contain_text("losses")
    expect(report.locator("code").first).to_have_css("background-color", "rgba(0, 0, 0, 0)")  # ours, not the page's
    report.evaluate("node => { node.style.padding = '14px'; }")
    for theme in ("Light", "Dark"):
        tab.set_theme(f"JupyterLab {theme}")
        write(report, pictures / f"report-{theme.lower()}.png")


@left_out_by_ci
def test_light_dark_plan_and_training(sharp_desk: Desk, fake_cuda_server: Server, pictures: Path) -> None:
    tab = on_the_device(sharp_desk, fake_cuda_server, [FIT.replace("100_000", "1_000")])  # which looks more like a fit
    picture(tab, pictures, "light")
    tab.set_theme("JupyterLab Dark")
    picture(tab, pictures, "dark")
    tab.set_theme("JupyterLab Light")
    tab.button(re.compile("^Clean stale")).click()
    expect(tab.heading("Clean stale: the plan")).to_be_visible()
    picture(tab, pictures, "plan")
    tab.button("Cancel").click()
    tab.start(0)
    expect(tab.heading("Fit")).to_be_visible()
    tab.wait_for_ticks(16)
    picture(tab, pictures, "training")
    tab.notebook.file(STOP_FILE).touch()
    tab.wait_for_end(0)


@left_out_by_ci
def test_out_of_memory(sharp_desk: Desk, fake_cuda_server: Server, pictures: Path) -> None:
    tab = on_the_device(sharp_desk, fake_cuda_server, [OOM])
    tab.start(0)
    wait_until(lambda: tab.prompt(0) != "[*]:", "the error")
    expect(tab.heading(re.compile("Out of memory"))).to_be_visible()
    picture(tab, pictures, "oom")
