"""axe-core's findings on a page."""

from __future__ import annotations

import json

from playwright.sync_api import Page

from tests.ui.servers import ROOT

_AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """async (part) => {
  const { violations } = await axe.run(part, { resultTypes: ['violations'] });
  return JSON.stringify(violations.map(({ id, impact, nodes }) => [impact, id, nodes.map(node => node.html)]));
}"""


def findings(page: Page, part: str) -> list[tuple[str, str]]:
    """Return impact and description of each finding in the part of the page that a CSS selector names."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(_AXE.read_text())
    return [(impact, f"{name}: {nodes}") for impact, name, nodes in json.loads(page.evaluate(_RUN, part))]


def view_findings(page: Page) -> list[tuple[str, str]]:
    """Return what axe finds in the view: impact and description."""
    return findings(page, ".nbguard-view")
