"""Two notebooks on one device: who else is there, by name, and a word before a cell runs out of what they leave."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.ui.axe import view_findings
from tests.ui.cells import LOAD, STOP_FILE
from tests.ui.conftest import Desk
from tests.ui.servers import Server

WAIT = "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)\n"
EMPTY = "torch.empty({} << 30, dtype=torch.uint8, device='cuda')"
TORCH = "import torch; torch.cuda.init()"
LARGE = f"{WAIT}batch = {EMPTY.format(5)}; del batch; torch.cuda.empty_cache()"
STEPS = f"held = []\nfor _ in range(3): held.append({EMPTY.format(1)}); time.sleep(1.2)\n{WAIT}"
"""A GiB more each second, until little is left."""


@pytest.mark.slow
def test_a_neighbour_by_name_and_a_word_before_the_device_is_full(desk: Desk, shared_cuda_server: Server) -> None:
    """The warning comes before the cell asks: by its last run, then by its pace; once each, and it goes with the cell."""
    server = shared_cuda_server
    notebook = desk.notebook(server, [LARGE, STEPS], "shared-cuda")
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run(TORCH).ok()
    tab = desk.open(notebook)
    tab.show_panel()
    tab.wait_for_ticks()
    warning = tab.panel.locator(".nbguard-near-full")
    notebook.file(STOP_FILE).touch()
    tab.run(0)
    expect(warning).to_be_hidden()
    for _ in range(8):
        notebook.kernel.run("pass").ok()  # so that its mark is none of the newest when it runs again

    other = desk.notebook(server, [], "shared-cuda-process", name="the other one.ipynb")
    other.kernel.run(f"{TORCH}; theirs = {EMPTY.format(4)}").ok()
    neighbours = tab.panel.locator(".nbguard-neighbours")
    expect(neighbours).to_have_text(re.compile(r"^Other notebooks: the other one\.ipynb 4(\.\d+)? GiB$"))

    notebook.file(STOP_FILE).unlink()
    tab.start(0)
    said = "cuda:0 may not have room for this cell: it reached 5 GiB when it ran last, and 3.12 GiB can be allocated."
    expect(warning).to_have_text(re.compile(re.sub(r"3\\\.12", r"3\\.\\d\\d", re.escape(said))))
    words = warning.inner_text()
    tab.wait_for_ticks(4)
    assert warning.inner_text() == words
    if tab.app == "lab":  # Notebook 7 has no status bar
        status = tab.page.locator(".nbguard-status-item")
        expect(status).to_have_class(re.compile("nbguard-warn"))
        expect(status.locator("button")).to_have_attribute("title", words)
    assert view_findings(tab.page) == []
    notebook.file(STOP_FILE).touch()
    tab.wait_for_end(0)
    expect(warning).to_be_hidden()

    notebook.file(STOP_FILE).unlink()
    notebook.kernel.run("import gc, sys; sys.last_value = sys.last_traceback = sys.last_exc = None; gc.collect()").ok()
    tab.start(1)
    expect(warning).to_contain_text(re.compile(r"cuda:0 is (nearly )?full"))
    words = warning.inner_text()
    tab.wait_for_ticks(4)
    assert warning.inner_text() == words
    notebook.file(STOP_FILE).touch()
    tab.wait_for_end(1)
    expect(warning).to_be_hidden()
    other.kernel.run("del theirs; torch.cuda.empty_cache()").ok()
    expect(neighbours).to_have_text(re.compile(r"^Other notebooks: the other one\.ipynb 4\d\d MiB$"))
