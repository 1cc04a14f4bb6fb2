"""The line and the dates of figures in real pages: Run All, another notebook on the device, marks, values, files."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.kernels import wait_until
from tests.ui.axe import view_findings
from tests.ui.cells import LOAD, STOP_FILE
from tests.ui.conftest import Desk
from tests.ui.looks import hosts
from tests.ui.pages import App, Tab
from tests.ui.servers import Server

GIB = 1 << 30
TORCH = "import torch; torch.cuda.init()"
ALLOCATE = "t{0} = torch.empty({1} << 20, dtype=torch.uint8, device='cuda'); import time; time.sleep(1.2)"
HOLD = "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)"
EMPTY = "torch.empty({} << 30, dtype=torch.uint8, device='cuda')"
SPIKE = f"spike = {EMPTY.format(3)}; del spike"
OOM = f"first = {EMPTY.format(2)}; second = {EMPTY.format(20)}"
LARGEST = re.compile(r"Largest request that fits now: ([\d.]+) GiB")


def on_the_device(desk: Desk, server: Server, cells: list[str], app: App = "lab", spec: str = "fake-cuda") -> Tab:
    notebook = desk.notebook(server, cells, spec)
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run(TORCH).ok()
    tab = desk.open(notebook, app)
    tab.show_panel()
    tab.wait_for_ticks()
    return tab


def run_all(tab: Tab) -> None:
    tab.page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")


def largest(tab: Tab) -> float | None:
    """Return the GiB that the panel says would fit now; None: it says nothing of now."""
    found = LARGEST.search(tab.part("Fragmentation").inner_text())
    return float(found[1]) if found else None


def area(tab: Tab) -> Locator:
    return tab.panel.get_by_role("application")


def saved(tab: Tab, entry: str) -> Path:
    """Return the file that an entry of the line's menu gives."""
    tab.button("Save the line").click()
    with tab.page.expect_download() as download:
        tab.panel.get_by_role("menuitem", name=entry).click()
    return Path(download.value.path())


@pytest.mark.slow
@hosts(in_ci="lab")
def test_run_all(desk: Desk, fake_cuda_server: Server, app: App) -> None:
    """Holders are of the cell before, or say of which they are; nothing is called now that is not."""
    cells = [ALLOCATE.format(n, 100 + n) for n in range(1, 9)]
    tab = on_the_device(desk, fake_cuda_server, [*cells, HOLD], app)
    run_all(tab)
    expect(tab.panel.locator(".nbguard-status")).to_contain_text("In[11]", timeout=120_000)
    held = tab.part("Held by").inner_text()
    date = re.search(r"(after|since) In\[(\d+)\]", held)
    assert date is not None, held
    last = int(date[2])
    assert last >= 4, held  # looked at between the cells
    assert set(re.findall(r"\bt(\d)\b", held)) == {str(n) for n in range(1, last - 1)}, held
    for heading in ("Fragmentation",):
        assert re.search(rf"(after|since) In\[{last}\]", tab.part(heading).inner_text())
    assert (largest(tab) is not None) == (last == 10)
    tab.notebook.file(STOP_FILE).touch()
    expect(tab.part("Held by")).to_contain_text(re.compile(r"after In\[1[01]\]"))
    wait_until(lambda: largest(tab) is not None, "what fits now")
    assert view_findings(tab.page) == []


@pytest.mark.slow
def test_run_all_on_a_page_just_loaded(desk: Desk, fake_cuda_server: Server) -> None:
    """Until the heap has been looked at, nobody says that it holds nothing, or nothing stale."""
    cells = [f"{LOAD}\n{TORCH}\n{ALLOCATE.format(1, 1100)}", ALLOCATE.format(2, 100), HOLD]
    tab = desk.open(desk.notebook(fake_cuda_server, cells, "fake-cuda"))
    tab.show_panel()
    run_all(tab)
    texts: list[str] = []

    def is_dated() -> bool:
        texts.append(tab.panel.inner_text())
        return re.search(r"(during|after) In\[\d\]", texts[-1]) is not None

    wait_until(is_dated, "the first look")
    assert [text for text in texts[:-1] if re.search(r"Nothing (holds|is stale)", text)] == []
    tab.notebook.file(STOP_FILE).touch()
    wait_until(lambda: set(re.findall(r"\bt\d\b", tab.part("Held by").inner_text())) == {"t1", "t2"}, "both to be listed")


@pytest.mark.slow
def test_two_notebooks_on_one_device(shared_cuda_server: Server, desk: Desk) -> None:
    cell = "mine = torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    tab = on_the_device(desk, shared_cuda_server, [cell], spec="shared-cuda")
    tab.run(0)
    wait_until(lambda: largest(tab) is not None, "what fits now")
    other = desk.notebook(shared_cuda_server, [], "shared-cuda")
    before = largest(tab)
    assert before is not None
    other.kernel.run(f"{TORCH}; theirs = {EMPTY.format(2)}").ok()
    wait_until(lambda: (largest(tab) or before) < before - 1.9, "what fits now to follow the other notebook")
    fits = largest(tab)
    assert fits is not None
    tab.notebook.kernel.run(f"torch.empty({int(fits * GIB) - (8 << 20)}, dtype=torch.uint8, device='cuda')").ok()


@pytest.mark.slow
@hosts(in_ci="notebook")
def test_marks_values_and_files(desk: Desk, fake_cuda_server: Server, app: App) -> None:
    filler = [f"# {n}" for n in range(30)]
    tab = on_the_device(desk, fake_cuda_server, [SPIKE, OOM, *filler, "'the end'"], app)
    tab.run(0)
    tab.wait_for_ticks(8)  # so that the two marks lie apart
    tab.run(1)
    tab.wait_for_ticks(2)
    panel = tab.panel
    expect(panel.locator(".nbguard-mark-peak").first).to_have_attribute("title", "In[3] · peak 3 GiB")
    expect(panel.locator(".nbguard-mark-request")).to_contain_text("20 GiB asked")
    path = panel.locator(".nbguard-chart-path").get_attribute("d") or ""
    assert "L" not in path  # steps
    assert re.search(r"V\d", path)
    expect(panel.locator(".nbguard-chart-scale span").first).to_have_text("3 GiB")

    # the mouse
    box = area(tab).bounding_box()
    assert box
    tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 10)
    expect(panel.locator(".nbguard-chart-value")).to_have_text(
        re.compile(r"^\d\d:\d\d:\d\d( · In\[\d+\])? · 2 GiB allocated, 3 GiB reserved$")
    )
    tab.page.mouse.move(10, 10)
    expect(panel.locator(".nbguard-chart-value")).to_be_hidden()

    # the keyboard
    area(tab).focus()
    tab.page.keyboard.press("Home")
    spoken = panel.get_by_role("status").first
    first = spoken.inner_text()
    assert re.search(r"^\d\d:\d\d:\d\d · .*0 B allocated|^\d\d:\d\d:\d\d · not known", first), first
    tab.page.keyboard.press("PageDown")
    tab.page.keyboard.press("ArrowRight")
    assert spoken.inner_text() != first

    # files
    rows = list(csv.DictReader(io.StringIO(saved(tab, "Save as table (CSV)").read_text())))
    assert max(int(row["most allocated"]) for row in rows) == 3 * GIB
    assert (int(rows[-1]["allocated"]), int(rows[-1]["reserved"])) == (2 * GIB, 3 * GIB)
    assert int(rows[-1]["free"]) + int(rows[-1]["used by others"]) < 6 * GIB
    assert {row["cell"] for row in rows} >= {"4"}
    assert saved(tab, "Save as picture (PNG)").read_bytes().startswith(b"\x89PNG")
    assert view_findings(tab.page) == []

    # the cell: by its id, for it has another number now
    tab.run(0)
    tab.scroll_to(32)
    tab.cell(32).locator(".cm-content").click()
    tab.page.mouse.wheel(0, 400)  # JupyterLab 4.4 takes the cell that was the active one off the page at the next turn
    expect(tab.cell(0)).not_to_be_in_viewport()
    panel.locator("button.nbguard-mark-label", has_text="In[3]").click()
    expect(tab.cell(0)).to_be_in_viewport()
    expect(tab.cell(0)).to_have_class(re.compile("jp-mod-active"))
