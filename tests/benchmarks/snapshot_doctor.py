"""Times of the page that reads snapshots, in Chromium: python -m tests.benchmarks.snapshot_doctor [FILE].

It prints seconds to a page that is ready, to the first answer on a file, and to the last; by default of the file in notebooks/.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from tests.ui.chromium import launch
from tests.ui.servers import ROOT

_PATIENCE = 600_000  # milliseconds


def main() -> None:
    """Print the times."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "notebooks" / "out_of_memory.pickle")
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "nbguard", "diagnose", file], stdout=subprocess.DEVNULL, check=False)
    print(f"nbguard diagnose {file.name} ({file.stat().st_size:,} B): {time.perf_counter() - begun:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "docs/site/snapshot_doctor.py", folder], check=True)
        with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=folder)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            _time_page(f"http://127.0.0.1:{server.server_port}/snapshot-doctor/index.html", file)
            server.shutdown()


def _time_page(address: str, file: Path) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page()
        begun = time.perf_counter()
        page.goto(address)
        expect(page.locator("body")).to_have_attribute("data-ready", "true", timeout=_PATIENCE)
        print(f"the page is ready: {time.perf_counter() - begun:.1f} s")
        begun = time.perf_counter()
        page.set_input_files("#files", file)
        expect(page.locator("#answer")).to_be_visible(timeout=_PATIENCE)
        print(f"first answer: {time.perf_counter() - begun:.1f} s")
        expect(page.locator("body")).to_have_attribute("data-done", "true", timeout=_PATIENCE)
        print(f"last answer: {time.perf_counter() - begun:.1f} s")
        browser.close()


if __name__ == "__main__":
    main()
