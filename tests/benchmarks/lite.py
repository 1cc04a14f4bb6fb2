"""Times and bytes of the page on which nbguard can be tried, in Chromium: python -m tests.benchmarks.lite.

It prints seconds to the notebook, to the first output and to the last one, and the bytes that the browser fetches until then.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

from tests.ui.chromium import launch
from tests.ui.servers import ROOT

_PATIENCE = 600_000  # milliseconds


class _Handler(SimpleHTTPRequestHandler):
    sent = 0

    def copyfile(self, source: Any, outputfile: Any) -> None:
        _Handler.sent += Path(source.name).stat().st_size
        super().copyfile(source, outputfile)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    """Print the times."""
    with tempfile.TemporaryDirectory() as folder:
        for program in ("snapshot_doctor", "lite"):
            begun = time.perf_counter()
            subprocess.run([sys.executable, ROOT / "docs" / "site" / f"{program}.py", folder], check=True)
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            print(f"{program}.py: {time.perf_counter() - begun:.1f} s; the site has {size / 1e6:.1f} MB then")
        with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=folder)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            _time_page(f"http://127.0.0.1:{server.server_port}/lite/notebooks/index.html?path=try.ipynb")
            server.shutdown()


def _time_page(address: str) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page()
        begun = time.perf_counter()
        page.goto(address)
        cells = page.locator(".jp-CodeCell")
        expect(cells.first).to_be_visible(timeout=_PATIENCE)
        _say("the notebook is there", begun)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        expect(page.locator(".jp-OutputArea-output").first).to_be_visible(timeout=_PATIENCE)
        _say("first output", begun)
        expect(cells.last.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=_PATIENCE)
        _say("last output", begun)
        browser.close()


def _say(what: str, begun: float) -> None:
    print(f"{what}: {time.perf_counter() - begun:.1f} s, {_Handler.sent / 1e6:.1f} MB fetched")


if __name__ == "__main__":
    main()
