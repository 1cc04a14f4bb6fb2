"""The browser of this machine."""

from __future__ import annotations

import shutil

from playwright.sync_api import Browser, Playwright

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync"]


def launch(playwright: Playwright) -> Browser:
    """Return a Chromium without a window. It is installed by the machine's own packages."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    assert program, "no Chromium: apt-get install chromium"
    return playwright.chromium.launch(executable_path=program, args=_FLAGS)
