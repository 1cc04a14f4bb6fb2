"""axe-core finds nothing on the pages of the site, in light and in dark colours. `make docs` builds them.

JupyterLite's own pages are not ours, and show nothing without a server.
"""

from __future__ import annotations

import os
from typing import Literal

import pytest
from playwright.sync_api import Browser

from tests.thorough import spread
from tests.ui.axe import findings
from tests.ui.servers import ROOT

SITE = ROOT / "build" / "site"
PAGES = spread(sorted(page for page in SITE.rglob("*.html") if SITE / "lite" not in page.parents), 8)

Scheme = Literal["light", "dark"]


@pytest.mark.slow
@pytest.mark.skipif(not PAGES and "CI" not in os.environ, reason="the site is not built: make docs")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: Scheme, browser: Browser) -> None:
    assert PAGES, "the site is not built: make docs"
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    found = {}
    for file in PAGES:
        page.goto(file.as_uri())
        found[file.relative_to(SITE).as_posix()] = findings(page, "html")
    context.close()

    assert {name: lines for name, lines in found.items() if lines} == {}
