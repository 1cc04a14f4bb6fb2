"""`nbguard.Sidebar`, the sidebar in an output cell as an ipywidget, and the report as a widget for hosts such as marimo."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import traitlets
from anywidget import AnyWidget
from IPython import get_ipython
from IPython.display import publish_display_data

from nbguard import api
from nbguard.errors import NbguardError, line_of
from nbguard.frontend.notebook.session import hub_of, session_of
from nbguard.frontend.sidebar.hub.comms import ThreadSafeComm
from nbguard.frontend.sidebar.memory_line import picture, report_picture
from nbguard.memory.core.analysis import DevicePart
from nbguard.render.markup import Html, tag

# --- The report as a widget, for hosts of widgets without IPython, such as marimo.


_ESM = """
export default {
  render({ model, el }) {
    const report = document.createElement("div");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Look again";
    button.style.cssText = "margin: 8px 0; padding: 3px 10px; border: 1px solid currentColor; border-radius: 3px";
    button.addEventListener("click", () => {
      model.set("looks", model.get("looks") + 1);
      model.save_changes();
    });
    const show = () => {
      report.innerHTML = model.get("html");
    };
    model.on("change:html", show);
    show();
    el.append(report, button);
    return () => model.off("change:html", show);
  },
};
"""


class ReportWidget(AnyWidget):
    """The report as of a moment, with a button that scans again. Its HTML is nbguard's own, with every name escaped.

    Attributes:
        html: the report.
        looks: how often the browser has asked for another one.
        report: the report itself, as `nbguard.report()` returns it; None where there is no PyTorch yet.
    """

    _esm = _ESM
    html = traitlets.Unicode().tag(sync=True)
    looks = traitlets.Int().tag(sync=True)
    report: Any = None

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.look()

    def __repr__(self) -> str:
        return "nbguard's report: shown where widgets are; here, nbguard.report() is the same"

    @traitlets.observe("looks")
    def _asked(self, _change: Any) -> None:
        self.look()

    def look(self) -> None:
        """Look at the memory once more and show it."""
        try:
            self.report = api.report()
            self.html = self.report.shown()["text/html"]
        except NbguardError as error:  # no PyTorch yet
            self.report, self.html = None, str(tag("p", str(error)))


_STATIC = Path(__file__).parent / "static"
_ALLOCATED = (DevicePart.ALLOCATED, DevicePart.PROCESS)
_CACHE = (DevicePart.CACHED, DevicePart.RELEASABLE, DevicePart.STRANDED, DevicePart.GRAPH_POOLS, DevicePart.PENDING)
_RESERVED = (*_ALLOCATED, *_CACHE)
_FREE = (DevicePart.FREE,)
"""Parts of a device that PyTorch has of it. On a CPU there is one, all memory of this process."""
_PROTOCOL = "2.1.0"
SIDEBAR = "application/vnd.nbguard.frontend.sidebar+json"
"""Type of the output that the extension of JupyterLab shows, live or as a picture, which a `picture` of its own keeps."""
_NO_KERNEL = (
    "this is not a Jupyter kernel, so nothing would keep a sidebar up to date: %gpumem, or nbguard.report(), shows the same "
    "figures of this moment"
)
_NOT_BUILT = "this install has no built view: `make build` makes it in the sources, a wheel has it (pip install nbguard)"
_OFF = "nbguard is off in this kernel: run `%load_ext nbguard`, or `%nbguard on`"


class Sidebar(AnyWidget):
    """The sidebar: who holds the memory, live, with its buttons. `Sidebar()` as the last line of a cell shows it.

    Any number can be shown. The totals are of all devices together, in bytes, for use with other widgets, as in
    `ipywidgets.jslink((sidebar, "allocated"), (bar, "value"))`; the browser cannot set them.

    Attributes:
        allocated: bytes in tensors now; on a CPU, where they are not counted, in use by this process.
        reserved: bytes that PyTorch has of the devices.
        free: bytes free on the devices.
        stale: bytes that a cleanup would free, as the last scan of the heap found.

    Where there is no IPython at all, as in marimo, `Sidebar()` is a `ReportWidget`: the report, and a button that scans again.

    Raises:
        NbguardError: this is IPython without an ipykernel, or this install has no view.
    """

    comm = traitlets.Any(allow_none=True)  # as since ipywidgets 8; before, one of ipykernel's own
    tick = traitlets.Dict().tag(sync=True)
    heap = traitlets.Dict().tag(sync=True)
    allocated = traitlets.Int().tag(sync=True)
    reserved = traitlets.Int().tag(sync=True)
    free = traitlets.Int().tag(sync=True)
    stale = traitlets.Int().tag(sync=True)

    def __new__(cls, *args: Any, **keys: Any) -> Any:
        """Return a sidebar, or its substitute where there is no IPython."""
        return super().__new__(cls, *args, **keys) if get_ipython() is not None else ReportWidget()

    def __init__(self, **keys: Any) -> None:
        shell: Any = get_ipython()
        if shell is None or session_of(shell).serve_sidebars() is None:
            raise NbguardError(_NO_KERNEL)
        self._kernel = shell.kernel
        self._esm, self._css = _built("widget.js"), _built("widget.css")
        super().__init__(**keys)

    def __repr__(self) -> str:
        return "nbguard's sidebar: shown where widgets are (JupyterLab, Notebook 7, VS Code, Colab); here, %gpumem reports"

    def _ipython_display_(self) -> None:
        """Show the sidebar in an output that can be updated: its picture is kept that of the last cell's end."""
        self.publish(str(_picture()))
        session_of(get_ipython()).keep_picture(self)

    def publish(self, picture: str, *, update: bool = False) -> None:
        """Send the widget's view, and its picture for where there is no kernel: an export, a notebook opened again.

        The extension of JupyterLab goes by the type of its own, and shows the one or the other. While the notebook is open
        there, it asks for the picture again when cells end; where no view is open, `SavedPictures` updates it.

        Args:
            picture: HTML.
            update: put it into the outputs that show this sidebar already.
        """
        shown: Any = self._repr_mimebundle_()
        data, metadata = shown
        data = {**data, SIDEBAR: {"model_id": self.model_id}, "text/html": picture}
        transient = {"display_id": f"nbguard-{self.model_id}"}
        publish_display_data(data, metadata, transient=transient, update=update)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Open the comm to the browser: one whose messages are handled beside a running cell, where there are subshells."""
        if self.comm is None:
            state = {"state": self.get_state(), "buffer_paths": []}
            target = {"target_name": "jupyter.widget", "comm_id": self._model_id, "metadata": {"version": _PROTOCOL}}
            self.comm = ThreadSafeComm(self._kernel, data=state, **target)

    def close(self) -> None:
        """Take the sidebar off the page, and be no client any more."""
        hub = hub_of(get_ipython())
        if hub is not None:
            hub.leave(self)
        super().close()

    packs = False

    def send(self, content: dict[str, Any], buffers: Any = None) -> None:
        """Show what the hub says: ticks and heaps are traits, an answer is a message."""
        match content:
            case {"op": "tick", "tick": tick}:
                totals = {
                    "allocated": _sum(tick, _ALLOCATED),
                    "reserved": _sum(tick, _RESERVED),
                    "free": _sum(tick, (DevicePart.FREE,)),
                }
                self._show(tick=tick, **totals)
            case {"op": "heap", "heap": heap}:
                self._show(heap=heap, stale=heap["stale"])
            case {"op": "closed"}:
                self._show(tick={}, heap={})
            case _:
                super().send(content, buffers)

    def _show(self, **traits: Any) -> None:
        with self.hold_sync():  # one message
            for name, value in traits.items():
                self.set_trait(name, value)

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        """Take a request to the hub. The synced values are not the browser's to set: it is told the true ones instead."""
        match msg["content"].get("data"):
            case {"method": "custom", "content": request}:
                self._ask(request)
            case {"method": "request_state"}:
                self.send_state()
            case {"method": "update", "state": dict(state)}:
                self.send_state([name for name in self.keys if name in state])

    def _ask(self, request: Any) -> None:
        hub = hub_of(get_ipython())
        if hub is not None:
            hub.receive(request, self)
        elif type(request) is dict and type(request.get("rid")) is str:
            self.send({"op": "refused", "rid": request["rid"], "why": _OFF})


def _picture() -> Html:
    """Return the report on the memory as it is now, with the cell and the hour."""
    shell: Any = get_ipython()
    cell = len(shell.history_manager.input_hist_parsed) - 1  # IPython counts a cell now before, now after it has run
    try:
        return report_picture(session_of(shell).memory.report(), cell, time.time())
    except NbguardError as error:  # no PyTorch yet
        body = tag("p", str(error))
    except Exception as error:  # noqa: BLE001 - a picture that fails must not cost the sidebar
        body = tag("p", f"There is no picture: {type(error).__name__} at {line_of(error)}.")
    return picture(body, cell, time.time())


def _built(name: str) -> str:
    """Return a file of the view that `npm run build:widget` has made."""
    file = _STATIC / name
    if not file.exists():
        raise NbguardError(_NOT_BUILT)
    return file.read_text(encoding="utf-8")


def _sum(tick: dict[str, Any], names: Collection[str]) -> int:
    return sum(part["nbytes"] for device in tick["devices"] for part in device["parts"] if part["name"] in names)
