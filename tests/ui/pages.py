"""A notebook on a server, and the browser tabs that show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jupyter_client import BlockingKernelClient
from playwright.sync_api import BrowserContext, Locator, Page

from tests.kernels import Kernel, wait_until
from tests.ui.servers import Server

App = Literal["lab", "notebook"]
_ADDRESS: dict[App, str] = {"lab": "lab/tree/{}?reset", "notebook": "notebooks/{}"}
_RECORDER = Path(__file__).with_name("recorder.js").read_text()

_IN_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"

_TOGGLED = """shown => {
  const id = 'nbguard:toggle-panel'; // the panel opens by itself, too, where a kernel has data: both in one turn of the page
  if (jupyterapp.commands.isToggled(id) !== shown) { return jupyterapp.commands.execute(id).then(() => {}); }
}"""
_EXECUTED = "async ([id, options]) => { await jupyterapp.commands.execute(id, options); }"
_CONNECTED = """async () => {
  const context = jupyterapp.shell.currentWidget.sessionContext;
  await context.ready;
  while (context.session?.kernel?.connectionStatus !== 'connected') await new Promise(done => setTimeout(done, 20));
}"""

_RESTARTED = """async () => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  await kernel.restart();
  await kernel.requestKernelInfo();
}"""

_WIDENED = """width => {
  const once = setInterval(() => {
    const widgets = [...(window.jupyterapp?.shell.widgets('right') ?? [])];
    const panel = widgets.find(widget => widget.isVisible && widget.node.querySelector('.nbguard-view'));
    let split = panel;
    while (split && !split.setRelativeSizes) split = split.parent;
    if (!split) return;
    clearInterval(once);
    const sizes = split.relativeSizes();
    const share = width / split.node.clientWidth;
    const rest = sizes.slice(0, -1);
    const whole = rest.reduce((sum, size) => sum + size, 0);
    split.setRelativeSizes([...rest.map(size => size / whole * (1 - share)), share]);
  }, 50);
}"""
"""Makes the panel so many pixels wide as soon as it is seen."""
_LAB_WIDTH = 245
"""Pixels that JupyterLab gives to a panel of its own accord."""

_PLACE = "data-windowed-list-index"
"""The attribute of a cell with its number in the notebook."""
_NAME = "(one.getAttribute('aria-label') || one.textContent || one.tagName).trim().replace(/\\s+/g, ' ')"
_CAN_BE_PRESSED = "one.checkVisibility({ visibilityProperty: true }) && !one.disabled"
_NAMES = f"view => [...view.querySelectorAll('button')].filter(one => {_CAN_BE_PRESSED}).map(one => {_NAME})"
_FOCUSED = f"view => {{ const one = document.activeElement; return one !== view && view.contains(one) ? {_NAME} : ''; }}"

# What JupyterLab and Notebook, which is made of its parts, say themselves, with no extension installed.
_OF_BOTH = (
    r"^Comm not found for comm id [0-9a-f-]{36}$|^Error: Canceled future for create_subshell_request"
    r"|^Could not restore the debugger state: Canceled future for debug_request"  # a restart came before the answer
    r"|^No active debugger session$"  # 4.7.0a2, after a cell of a kernel whose kernelspec names no debugger
)
_THEIRS = {
    "lab": re.compile(_OF_BOTH),
    "notebook": re.compile(rf"{_OF_BOTH}|reading 'schema'|Command 'filebrowser:open-path' not registered"),
}


class ServersKernel(Kernel):
    """A kernel that a server has started, spoken to directly: what the notebook's page does not see."""

    def __init__(self, connection: Path) -> None:
        self.client = BlockingKernelClient(connection_file=str(connection))
        self.client.load_connection_file()
        self.client.start_channels()
        self._wait_until_heard()

    def wait_for_restart(self) -> None:
        """Return when the kernel that the server started anew is heard: until then its output is lost to this client."""
        self._wait_until_heard()

    def offers_subshells(self) -> bool:
        """Say whether this ipykernel has subshells. Not while a cell runs: without them it would answer at its end."""
        return "kernel subshells" in self.client.kernel_info(reply=True, timeout=60)["content"].get("supported_features", [])

    def threads(self) -> list[str]:
        """Return the names of the Python threads that run."""
        names: list[str] = self.value("sorted(t.name for t in __import__('threading').enumerate())")
        return names

    def resting_threads(self) -> list[str]:
        """Return the same as soon as nbguard's worker, which ends when it has nothing to do, is not among them.

        Subshells are left out: they are JupyterLab's, for comms, and the panel opens none.
        """
        names: list[str] = []

        def rests() -> bool:
            names[:] = self.threads()  # this is a cell too: what waits beside it is the worker's to do
            return "nbguard worker" not in names

        wait_until(rests, "the worker to end")
        return [name for name in names if not name.startswith("subshell-")]

    def stop(self) -> None:
        """Hang up. The kernel is its server's."""
        self.client.stop_channels()


@dataclass
class Notebook:
    """A notebook file with a session of its own on a server."""

    server: Server
    name: str
    session: str
    id: str
    kernel: ServersKernel

    @classmethod
    def make(cls, server: Server, name: str, cells: list[str], kernelspec: str) -> Notebook:
        """Write the file and start its kernel."""
        import nbformat  # here: see `pytest_collection_modifyitems`

        kernel = {"name": kernelspec, "display_name": kernelspec, "language": "python"}
        document = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}
        )
        nbformat.write(document, server.notebooks / name)
        request = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernelspec}}
        session = server.ask("POST", "api/sessions", request)
        number = session["kernel"]["id"]
        wait_until(server.connection_file(number).exists, "the kernel's connection file")
        return cls(server, name, session["id"], number, ServersKernel(server.connection_file(number)))

    def file(self, name: str) -> Path:
        """Return a file beside the notebook."""
        return self.server.notebooks / name


class Tab:
    """A browser tab with a notebook open."""

    def __init__(self, context: BrowserContext, notebook: Notebook, app: App, width: int = _LAB_WIDTH) -> None:
        self.notebook = notebook
        self.errors: list[str] = []
        self.app = app
        self.page: Page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.add_init_script(_RECORDER)
        if width != _LAB_WIDTH:
            self.page.add_init_script(f"({_WIDENED})({width})")
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        self.page.goto(notebook.server.url + _ADDRESS[app].format(notebook.name))
        self.wait_until_connected()

    def _note(self, error: str) -> None:
        if not _THEIRS[self.app].search(error):
            self.errors.append(error)

    def wait_until_connected(self) -> None:
        """Return when the notebook is shown and its kernel connected."""
        self.page.locator(f"{_IN_FRONT} .jp-Cell:visible").first.wait_for()
        self.page.evaluate(_CONNECTED)

    def restart_kernel(self) -> None:
        """Restart the notebook's kernel as the menu does, and return when it answers: a cell that is run before is lost."""
        self.page.evaluate(_RESTARTED)

    def reload(self) -> None:
        """Load the page again and return when the notebook's kernel is there."""
        self.page.reload()
        self.wait_until_connected()

    def execute(self, command: str, **options: object) -> None:
        """Run a command of the page to its end. What it gives, often a widget with the whole page behind it, is not fetched."""
        self.page.evaluate(_EXECUTED, [command, options])

    # --- the notebook ----------------------------------------------------------------------------------------------------

    def cell(self, number: int) -> Locator:
        """Return a cell by its number in the notebook. JupyterLab 4.4 has only those in view on the page."""
        return self.page.locator(f"{_IN_FRONT} .jp-CodeCell[{_PLACE}='{number}']")

    def scroll_to(self, number: int) -> None:
        """Turn the wheel until the beginning of a cell is in view."""
        cell, first = self.cell(number), self.page.locator(f"{_IN_FRONT} .jp-CodeCell:visible").first
        notebook = self.page.locator(f"{_IN_FRONT} .jp-WindowedPanel-outer")
        notebook.hover()

        def is_in_view() -> bool:
            box = cell.bounding_box() if cell.count() else None  # it would be waited for
            around = notebook.bounding_box()
            assert around
            above = int(first.get_attribute(_PLACE) or 0) - number if box is None else around["y"] - box["y"]
            if box is not None and above <= 0 and box["y"] < around["y"] + around["height"] - 50:
                return True
            self.page.mouse.wheel(0, -150 if above > 0 else 150)
            return False

        wait_until(is_in_view, f"cell {number} to be scrolled to")

    def prompt(self, number: int) -> str:
        return self.cell(number).locator(".jp-InputPrompt").inner_text().strip()

    def start(self, number: int) -> None:
        """Run a cell by keyboard, and return when it runs or has run."""
        if not self.cell(number).is_visible():
            self.scroll_to(number)
        before = self.prompt(number)
        self.cell(number).locator(".cm-content").click(position={"x": 4, "y": 4})  # a long line goes on below the panel
        self.page.keyboard.press("Control+Enter")
        wait_until(lambda: self.prompt(number) != before, f"cell {number} to start")

    def run(self, number: int) -> None:
        """Run a cell by keyboard to its end."""
        self.start(number)
        self.wait_for_end(number)

    def wait_for_end(self, number: int, within: float = 60) -> None:
        wait_until(lambda: "*" not in self.prompt(number), f"cell {number} to end", within)

    def show(self, notebook: Notebook) -> None:
        """Open another notebook in this tab, or bring it to the front."""
        self.execute("docmanager:open", path=notebook.name)
        self.wait_until_connected()

    def set_theme(self, theme: str) -> None:
        self.execute("apputils:change-theme", theme=theme)
        wait_until(lambda: self.page.locator(f'body[data-jp-theme-name="{theme}"]').count(), theme)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    # --- the panel -------------------------------------------------------------------------------------------------------

    @property
    def panel(self) -> Locator:
        """Return the panel's view; the same view in an output cell is not it."""
        return self.page.locator(".nbguard-view:not(.jp-OutputArea *)")

    def button(self, name: str | re.Pattern[str]) -> Locator:
        return self.panel.get_by_role("button", name=name, exact=isinstance(name, str))

    def heading(self, name: str | re.Pattern[str]) -> Locator:
        return self.panel.get_by_role("heading", name=name, level=3)

    def part(self, heading: str | re.Pattern[str]) -> Locator:
        """Return the part of the panel under a heading."""
        return self.panel.locator("section", has=self.page.get_by_role("heading", name=heading, level=3))

    def show_panel(self) -> None:
        """Open the panel, if it is not, by the command of the palette and the menu."""
        self.page.evaluate(_TOGGLED, True)
        self.panel.wait_for()

    def hide_panel(self) -> None:
        self.page.evaluate(_TOGGLED, False)
        self.panel.wait_for(state="hidden")

    def set_width(self, width: int, ticks: int = 2) -> None:
        """Make the panel so many pixels wide, as far as JupyterLab lets it, by dragging its edge, and wait for ticks."""
        box = self.panel.bounding_box()
        assert box
        self.page.mouse.move(box["x"] - 2, 400)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] - width, 400, steps=3)
        self.page.mouse.up()
        self.page.mouse.move(10, 10)
        self.wait_for_ticks(ticks)

    def names(self) -> list[str]:
        """Return the accessible names of the panel's buttons that can be pressed now."""
        return [name for name in self.page.evaluate(_NAMES, self.panel.element_handle()) if name]

    def focused(self) -> str:
        """Return the accessible name of what has the focus in the panel; empty: the focus is elsewhere."""
        found: str = self.page.evaluate(_FOCUSED, self.panel.element_handle())
        return found

    def wait_for_ticks(self, count: int = 1) -> None:
        """Return when the panel has drawn so many more ticks than now."""
        first = self.tick()
        wait_until(lambda: self.tick() >= first + count, "ticks")

    def tick(self) -> int:
        """Return the number of the last tick that was drawn; -1 before the first."""
        number = self.panel.get_attribute("data-tick") if self.panel.count() else None
        return int(number) if number else -1

    def times(self, selector: str = ".nbguard-view", seconds: float = 3) -> list[float]:
        """Return when, in milliseconds, ticks were drawn in the seconds that follow."""
        found: list[float] = self.page.evaluate("([selector, ms]) => recorder.ticks(selector, ms)", [selector, seconds * 1000])
        return found

    @contextmanager
    def asked(self) -> Iterator[Callable[[str], float]]:
        """Within: `after(op)` waits for an answer and says how many milliseconds after the last click it arrived."""
        self.page.evaluate("() => recorder.reset()")

        def after(op: str) -> float:
            found: float = self.page.evaluate("op => recorder.after(op)", op)
            return found

        yield after

    def frames(self) -> list[dict[str, Any]]:
        """Return nbguard's messages since the last reset: op, time and size."""
        return json.loads(self.page.evaluate("() => JSON.stringify(recorder.frames)"))  # type: ignore[no-any-return]
