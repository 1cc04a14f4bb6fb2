"""The report as a widget, for hosts of widgets without IPython, such as marimo."""

from __future__ import annotations

from typing import Any

import traitlets
from anywidget import AnyWidget

from nbguard import api
from nbguard.errors import NbguardError
from nbguard.render.markup import tag

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
