"""The page on which nbguard can be tried, in a real browser, offline: its notebook prints there what a kernel prints."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.kernels import Cell, Kernel
from tests.site.try_notebook import code_cells, put_files
from tests.ui.servers import ROOT

_START = 180_000
"""Milliseconds until Python has run all cells, on a machine that does much besides: 16 s where it does nothing else."""
_TEXT = "html => { const place = document.createElement('div'); place.innerHTML = html; return place.textContent; }"


_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
"""Lets the page and its workers reach this server alone."""


class _Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _POLICY)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the page, as `make docs` builds it: with the wheels that it has downloaded."""
    if importlib.util.find_spec("jupyterlite_core") is None and "CI" not in os.environ:
        pytest.skip("JupyterLite is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    for program in ("snapshot_doctor", "lite"):
        subprocess.run([sys.executable, ROOT / "docs" / "site" / f"{program}.py", folder], check=True)
    (folder / "favicon.ico").touch()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(site: str, browser: Browser) -> Iterator[Page]:
    """The notebook in a tab. No console may have shown an error, and nothing may have been fetched from elsewhere."""
    context = browser.new_context(reduced_motion="reduce")
    errors: list[str] = []
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    context.on("weberror", lambda error: errors.append(str(error.error)))
    page = context.new_page()
    page.goto(site + "lite/notebooks/index.html?path=try.ipynb")
    yield page
    assert errors == []
    assert [address for address in asked if not address.startswith((site, "data:", "blob:"))] == []
    context.close()


@pytest.mark.slow
def test_its_cells_print_what_a_kernel_prints(page: Page, plain_kernel: Kernel) -> None:
    cells = page.locator(".jp-CodeCell")
    expect(cells).to_have_count(len(code_cells()))
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    put_files(plain_kernel.cwd)
    printed = [plain_kernel.run(code) for code in code_cells()]

    expect(cells.last.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=_START)
    for number, cell in enumerate(printed):
        expected = _expected(cell, page)
        assert _shown(cells.nth(number)) == expected, code_cells()[number]
        assert expected or code_cells()[number].startswith(("%load_ext", "%gpumem map --history"))
    _slide(page)


def _shown(cell: Locator) -> list[str]:
    """Return the texts of the outputs of a cell in the browser, but for widgets."""
    found = cell.locator(".jp-RenderedText:not([data-mime-type$=stderr]), .jp-RenderedHTML")
    return [text.rstrip("\n") for text in found.all_text_contents() if text]


def _expected(cell: Cell, page: Page) -> list[str]:
    """Return the same of a kernel."""
    rich = [page.evaluate(_TEXT, bundle["text/html"]) for bundle in cell.bundles if _is_rich(bundle)]
    return [text.rstrip("\n") for text in (cell.stdout, *rich) if text]


def _is_rich(bundle: dict[str, Any]) -> bool:
    return "text/html" in bundle and "application/vnd.jupyter.widget-view+json" not in bundle


def _slide(page: Page) -> None:
    """Go to the beginning of the history by its slider, which the page's Python answers."""
    slider = page.get_by_role("slider", name="Event of the history")
    slider.focus()
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", "event 0 of 1,306")
    widget = page.locator(".jp-OutputArea-output", has=slider)
    expect(widget).to_contain_text("allocated 0 B · reserved 0 B")
