"""A notebook with a sidebar in it, saved: opened again without its kernel it shows what the sidebar showed."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.ui.conftest import Desk
from tests.ui.pages import App
from tests.ui.servers import Server

NAME = 'import torch; held = {"<b>bold</b>": torch.ones(8 << 18)}; weights = held["<b>bold</b>"]'
SIDEBAR = "import nbguard; nbguard.Sidebar()"
PICTURE = re.compile(r"The sidebar as of In\[\d+\]")


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_the_picture_stays_with_the_notebook(desk: Desk, server: Server, app: App) -> None:
    server.set_options(openOnData=False)
    notebook = desk.notebook(server, [NAME, SIDEBAR])
    tab = desk.open(notebook, app)
    tab.run(0)
    tab.run(1)
    output = tab.cell(1).locator(".jp-OutputArea-child")
    expect(output.locator(".nbguard-view")).to_be_visible()
    expect(output.get_by_text(PICTURE)).to_have_count(0)
    tab.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    wait_until(lambda: "The sidebar as of In[" in notebook.file(notebook.name).read_text(), "the notebook to be saved")

    tab.reload()  # its kernel has the widget still
    expect(tab.cell(1).locator(".nbguard-view")).to_be_visible()
    server.ask("POST", f"api/kernels/{notebook.id}/restart")
    tab.reload()

    expect(output.get_by_text(PICTURE)).to_be_visible()
    expect(output.get_by_text("weights").first).to_be_visible()
    expect(output.get_by_text("8.00 MiB").first).to_be_visible()
    expect(output.get_by_text("Error displaying widget")).to_have_count(0)
    expect(output.locator("b", has_text=re.compile("^bold$"))).to_have_count(0)
