"""marimo, which has no IPython: results show themselves, and what they tell to run is a call."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.servers import ROOT, free_port

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import nbguard
    import torch
    losses = [torch.ones(1 << 20) for _ in range(11)]
    a, b, c, d, e, f, g, h, i, j, k, l, m, n = (torch.ones(1 << 20) for _ in range(14))
    kept = []
    return kept, losses, mo, nbguard, torch


@app.cell
def _(kept, mo, nbguard, torch):
    keep = mo.ui.button(label="Keep more", on_click=lambda _: kept.append(torch.ones(1 << 20)))
    free = mo.ui.button(label="Free", on_click=lambda _: print(nbguard.release()))
    mo.hstack([keep, free])
    return


@app.cell
def _(torch):
    def fit():
        activations = [torch.ones(1 << 20) for _ in range(10)]
        raise ValueError("no more")
    fit()
    return


@app.cell
def _(losses, nbguard):
    nbguard.why("losses")
    return


@app.cell
def _(losses, nbguard):
    nbguard.Sidebar()
    return


@app.cell
def _(nbguard):
    nbguard.diagnose()
    return


@app.cell
def _(nbguard):
    nbguard.why("nobody")
    return
"""


@pytest.fixture(params=["edit", "run"])
def marimo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a marimo of its own, in which the notebook is edited or run."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    (tmp_path / "marimo").mkdir()
    (tmp_path / "marimo" / "marimo.toml").write_text(
        "[runtime]\nauto_instantiate = true\n"
    )  # an editor that runs what it opens
    url = f"http://127.0.0.1:{(port := free_port())}/"
    options = ["--headless", "--no-token", f"--port={port}"]
    old_name = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # of a setting that is made before marimo starts
    environment = {**os.environ, **old_name, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "marimo", "--quiet", request.param, *options, "notebook.py"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_up(process, url, tmp_path / "log")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}health", timeout=5).close()
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_results_name_calls_and_free_what_a_failed_cell_holds(marimo: str, browser: Browser) -> None:
    page = browser.new_context().new_page()
    page.goto(marimo)

    expect(page.get_by_text('nbguard.release("losses")').first).to_be_visible(timeout=60_000)
    allocated, look = page.locator("tr", has_text="allocated"), page.get_by_role("button", name="Look again")
    look.click()
    expect(allocated).to_contain_text("140 MiB")
    expect(page.locator("tr", has_text="last error")).to_contain_text("40 MiB")  # of a cell that marimo still shows
    page.get_by_role("button", name="Free").click()
    look.click()
    expect(allocated).to_contain_text("100 MiB")
    page.get_by_role("button", name="Keep more").click()
    look.click()
    expect(allocated).to_contain_text("104 MiB")
    expect(page.locator("tr", has_text="more").first).to_be_visible()
    expect(page.get_by_text("# before marimo starts").first).to_be_visible(timeout=60_000)
    said = page.locator("body").inner_text()
    assert not re.search(r"%(gpumem|reset_gpu|nbguard|%profile_fit)|-n shows|Jupyter starts", said)

    page.context.close()
