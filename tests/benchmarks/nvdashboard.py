"""jupyterlab-nvdashboard in a page of its own, measured as our panel is.

Its data come from the server, not from a kernel: a server extension sends a message for each chart, ten times a second. The
chart of the machine's processor, memory, disk and network is what can be measured without a GPU's driver.
"""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import BrowserContext, Page

from tests.kernels import wait_until
from tests.ui.pages import Notebook
from tests.ui.servers import OtherExtension

_BUTTON = "[...document.querySelectorAll('button')].find(one => one.textContent.trim() === 'Machine Resources')"
_COUNTER = """
window.updates = { count: 0, last: 0 };
window.WebSocket = class extends WebSocket {
  constructor(...args) {
    super(...args);
    if (String(args[0]).includes('/nvdashboard/')) {
      this.addEventListener('message', ({ data }) => (window.updates.count += String(data).includes('"time"') ? 1 : 0));
    }
  }
};
"""
_PRESSED = f"""() => {{
  // a page that is loaded anew has none of its charts: its list is shown and its button pressed as soon as they are there
  window.waiting ||= window.jupyterapp?.restored.then(() => (window.restored = true)); // a chart opened before is thrown away
  const button = window.restored && {_BUTTON};
  if (window.restored && !button) {{ window.jupyterapp.shell.activateById('gpu-dashboard'); }}
  if (!window.pressed && button) {{ window.pressed = true; button.click(); }}
  return document.querySelector('.recharts-line-curve[d]') && performance.now();
}}"""
_DRAWN = "() => document.querySelector('.recharts-line-curve[d]') && performance.now()"
"""A curve needs two updates: the first that a user can see."""


def extension_of(peers: Path) -> OtherExtension | None:
    """Return the extension in the folder into which `make bench` installs peers; None if it is not there."""
    found = OtherExtension("jupyterlab-nvdashboard", "jupyterlab_nvdashboard", peers)
    return found if (peers / found.module).exists() else None


class Dashboard:
    """A tab with the notebook and, beside it, the chart of this machine's processor and memory."""

    def __init__(self, context: BrowserContext, notebook: Notebook) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.add_init_script(_COUNTER)
        self.page.goto(f"{notebook.server.url}lab/tree/{notebook.name}?reset")
        self.page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
        self.show_list()

    @property
    def updates(self) -> int:
        """Return how many updates the page has been sent."""
        count: int = self.page.evaluate("() => window.updates.count")
        return count

    def show_list(self) -> None:
        """Show its list of charts in the left sidebar, as it stays from then on."""
        self.page.evaluate("async () => { await jupyterapp.restored; jupyterapp.shell.activateById('gpu-dashboard'); }")
        self.page.wait_for_function(f"() => {_BUTTON}")

    def open(self) -> float:
        """Press the chart's button, and return the milliseconds to its first curve."""
        drawn, pressed = self.page.evaluate(f"""async () => {{
            const pressed = performance.now();
            {_BUTTON}.click();
            for (;;) {{
                await new Promise(requestAnimationFrame);
                if (({_DRAWN})()) return [performance.now(), pressed];
            }}
        }}""")
        return float(drawn - pressed)

    def close(self) -> None:
        """Close the chart."""
        self.page.evaluate(
            "() => [...jupyterapp.shell.widgets('main')].find(one => one.id === 'machine-resource-widget')?.close()"
        )
        wait_until(lambda: not self.page.locator(".recharts-line-curve").count(), "the chart to be closed")

    def first_data(self) -> float:
        """Load the page again, and return the seconds to the first curve, the chart's button pressed as soon as it is there."""
        self.page.bring_to_front()
        self.page.reload(wait_until="commit")
        at: float = self.page.wait_for_function(_PRESSED, polling="raf").json_value()
        self.page.wait_for_timeout(500)
        return at / 1000
