"""A notebook with a sidebar in it, saved: opened again without its kernel it shows what the sidebar showed at the end."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.ui.cells import LOAD
from tests.ui.conftest import Desk
from tests.ui.looks import hosts
from tests.ui.pages import App, Notebook, Tab
from tests.ui.servers import Server

NAME = 'import torch; held = {"<b>bold</b>": torch.ones(8 << 18)}; weights = held["<b>bold</b>"]'
SIDEBAR = "import nbguard; nbguard.Sidebar()"
LATER = "held['more'] = torch.ones(16 << 18); del weights"
PICTURE = re.compile(r"The sidebar as of In\[\d+\]")


def save(tab: Tab) -> None:
    tab.execute("docmanager:save")


def saved_picture(notebook: Notebook) -> str:
    """Return the HTML that the saved notebook has of its sidebar; empty: it has none."""
    saved: Any = nbformat.read(notebook.file(notebook.name), as_version=4)
    outputs = [output for cell in saved.cells for output in cell.get("outputs", []) if "data" in output]
    return "".join(output.data.get("text/html", "") for output in outputs)


@pytest.mark.slow
@hosts(in_ci="lab")
def test_the_picture_of_the_end_stays_with_the_notebook(desk: Desk, server: Server, app: App) -> None:
    server.set_options(openOnData=False)
    notebook = desk.notebook(server, [NAME, SIDEBAR, LATER])
    tab = desk.open(notebook, app)
    tab.run(0)
    tab.run(1)
    output = tab.cell(1).locator(".jp-OutputArea-child")
    view = output.locator(".nbguard-view")
    expect(view).to_be_visible()
    expect(output.get_by_text(PICTURE)).to_have_count(0)
    save(tab)
    wait_until(lambda: "The sidebar as of In[2]" in saved_picture(notebook), "the notebook to be saved")
    assert "weights" in saved_picture(notebook)

    view.evaluate("node => node.classList.add('is-the-same')")
    tab.run(2)

    def is_of_the_end() -> bool:
        save(tab)
        return "The sidebar as of In[3]" in saved_picture(notebook)

    wait_until(is_of_the_end, "the picture of the last cell's end to be saved")
    expect(output.locator(".nbguard-view.is-the-same")).to_be_visible()  # a picture is no reason to draw the live view anew
    picture = saved_picture(notebook)
    assert "weights" not in picture
    assert "24 MiB" in picture
    exported, _ = HTMLExporter().from_filename(str(notebook.file(notebook.name)))
    assert "The sidebar as of In[3]" in exported
    assert "24 MiB" in exported

    tab.reload()  # its kernel has the widget still
    expect(view).to_be_visible()
    server.ask("POST", f"api/kernels/{notebook.id}/restart")
    tab.reload()

    expect(output.get_by_text(PICTURE)).to_be_visible()
    expect(output.get_by_text("held").first).to_be_visible()
    expect(output.get_by_text("24 MiB").first).to_be_visible()
    expect(output.get_by_text("Error displaying widget")).to_have_count(0)
    expect(output.locator("b", has_text=re.compile("^bold$"))).to_have_count(0)
    before = saved_picture(notebook)
    notebook.kernel.wait_for_restart()
    notebook.kernel.run(LOAD).ok()  # another run of the kernel, which has not shown this sidebar
    tab.page.wait_for_timeout(1500)
    save(tab)
    tab.page.wait_for_timeout(500)
    assert saved_picture(notebook) == before
