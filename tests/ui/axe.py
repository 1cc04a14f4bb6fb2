"""axe-core's findings on a page."""

from __future__ import annotations

import json

from playwright.sync_api import Page

from tests.ui.servers import ROOT

_AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """async () => {
  const { violations } = await axe.run('.nbguard-view', { resultTypes: ['violations'] });
  return JSON.stringify(violations.map(({ id, impact, nodes }) => [impact, id, nodes.map(node => node.html)]));
}"""


def serious_findings(page: Page) -> list[str]:
    """Return what is serious or critical in the view."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(_AXE.read_text())
    found = json.loads(page.evaluate(_RUN))
    return [f"{name}: {nodes}" for impact, name, nodes in found if impact in ("serious", "critical")]
