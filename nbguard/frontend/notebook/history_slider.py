"""`%gpumem map --history`, a slider through the allocator's recorded history, with the moment that it stands at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets
from anywidget import AnyWidget

from nbguard.errors import NbguardError, line_of
from nbguard.frontend.notebook.widget import SIDEBAR
from nbguard.render.markup import tag

if TYPE_CHECKING:
    from nbguard.memory.snapshots.moment import RecordedHistory, SnapshotMoment

_ESM = """
export default {
  render({ model, el }) {
    const bar = document.createElement("div");
    bar.style.cssText = "display: flex; align-items: center; gap: 10px; margin: 4px 0; font-size: 12px";
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = "0";
    slider.max = String(model.get("events"));
    slider.setAttribute("aria-label", "Event of the history");
    slider.style.flex = "1";
    const place = document.createElement("output");
    place.style.cssText = "min-width: 16ch; font-variant-numeric: tabular-nums";
    const moment = document.createElement("div");
    let asked = null;
    let next = null;
    const name = () => {
      const words = `event ${Number(slider.value).toLocaleString("en")} of ${model.get("events").toLocaleString("en")}`;
      place.textContent = words;
      slider.setAttribute("aria-valuetext", words);
    };
    const ask = event => {
      if (asked !== null) {
        next = event;
      }
      if (asked !== null || event === model.get("asked")) {
        return;
      }
      asked = event;
      model.set("asked", event);
      model.save_changes();
    };
    const go = event => {
      slider.value = String(event);
      name();
      ask(event);
    };
    const show = () => {
      moment.innerHTML = model.get("html");
      if (asked === null) {
        slider.value = String(model.get("at"));
        name();
      }
    };
    const answered = () => {
      asked = null;
      if (next !== null) {
        const event = next;
        next = null;
        ask(event);
      }
    };
    const buttons = Object.entries(model.get("places")).map(([words, event]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = words;
      button.style.cssText = "padding: 1px 8px; border: 1px solid; border-radius: 3px; background: none; color: inherit";
      button.addEventListener("click", () => go(event));
      return button;
    });
    const end = () => {
      for (const control of [slider, ...buttons]) {
        control.disabled = model.get("is_over");
        control.title = model.get("is_over") ? "Only the latest slider moves. Run the cell again." : "";
      }
    };
    slider.addEventListener("input", () => go(Number(slider.value)));
    model.on("change:html", show);
    model.on("change:answers", answered);
    model.on("change:is_over", end);
    show();
    end();
    bar.append(slider, place, ...buttons);
    el.append(bar, moment);
    return () => {
      model.off("change:html", show);
      model.off("change:answers", answered);
      model.off("change:is_over", end);
    };
  },
};
"""

_latest: list[HistorySlider] = []
"""The slider that moves. ipywidgets keeps all widgets, and each history has a hundred bytes and more for an event."""


class HistorySlider(AnyWidget):
    """A slider over the events of one device's history, and the moment after the event that it stands at.

    Attributes:
        html: the moment.
        at: the event that `html` is about.
        asked: the event that the browser asks for.
        answers: how many of its questions were answered.
        events: the number of the last event.
        places: events that have a button, by its words.
        is_over: a later slider took its place.
    """

    _esm = _ESM
    html = traitlets.Unicode().tag(sync=True)
    at = traitlets.Int().tag(sync=True)
    asked = traitlets.Int(-1).tag(sync=True)
    answers = traitlets.Int().tag(sync=True)
    events = traitlets.Int().tag(sync=True)
    places = traitlets.Dict().tag(sync=True)
    is_over = traitlets.Bool(False).tag(sync=True)

    def __init__(self, history: RecordedHistory, moment: SnapshotMoment, rows: int) -> None:
        """`moment` is the one to begin with, of one device; `rows` as in the moment's blocks."""
        (device,) = moment.devices
        self._device = int(device.device.removeprefix("cuda:"))
        self._history: RecordedHistory | None = history
        self._rows = rows
        states = history.of(self._device)
        refused = {} if states.refused is None else {"first refusal": states.refused}
        super().__init__(
            html=moment.mimebundle(limit=rows)["text/html"],
            at=device.event,
            events=states.events,
            places={"peak": states.peak, **refused},
        )
        for former in _latest:
            former.is_over, former._history = True, None
        _latest[:] = [self]

    def __repr__(self) -> str:
        return "nbguard's slider through the history: shown where widgets are; here, %gpumem map --at says the same of a moment"

    @traitlets.observe("asked")
    def _look(self, _change: Any) -> None:
        """Show the moment that the browser asks for."""
        if self._history is None:
            return
        event = min(max(self.asked, 0), self.events)
        try:
            moment = self._history.at(event, self._device)
            with self.hold_sync():
                self.at, self.html = event, moment.mimebundle(limit=self._rows)["text/html"]
        except NbguardError as error:
            self.html = str(tag("p", str(error)))
        except Exception as error:  # noqa: BLE001 - a moment that fails must not end the slider
            self.html = str(tag("p", f"There is no such moment: {type(error).__name__} at {line_of(error)}."))
        self.answers += 1


def slider_bundle(history: RecordedHistory, moment: SnapshotMoment, rows: int) -> dict[str, Any]:
    """Return a slider's mimebundle. The extension of JupyterLab shows the moment beside it where the widget is gone."""
    slider = HistorySlider(history, moment, rows)
    shown: Any = slider._repr_mimebundle_()
    return {**shown[0], SIDEBAR: {"model_id": slider.model_id, "picture": "own"}}
