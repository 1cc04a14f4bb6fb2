"""Sentences after a cell that did not fit the device: on the bytes that lay in the airbag, and the models that took turns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbguard.memory.cells.hooks import CellFact
from nbguard.units import MiB

if TYPE_CHECKING:
    from nbguard.memory.room.garage import Garage
    from nbguard.memory.room.spill_watch import SpillWatch


# --- One line after a cell with a predicted fit, which puts the predicted peaks next to the measured ones


class PredictedFits:
    """Hands a sentence to `say` after each cell with a predicted fit. Any other cell costs one lookup in a dictionary."""

    name = "prediction compared with real memory"
    rank = 20

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def before(self) -> None:
        """Do nothing: counters go on by themselves."""

    def after(self, cell: CellFact) -> None:  # noqa: ARG002 - the figures are the device's
        """Compare a prediction with its fit in one line."""
        calibration: Any = sys.modules.get("nbguard.training.prediction.calibration")
        if calibration is None:
            return
        for sentence in calibration.outcomes():
            self._say(sentence)


# --- airbag


_SAID_FROM = MiB
"""Spilled bytes of a cell that are worth a line, at least."""


class AirbagWatch:
    """Brings back the bytes that a cell has spilled, and says so through `show`. Without an airbag it looks at nothing."""

    name = "the airbag"
    rank = 5  # before all that reads the memory which the cell leaves

    def __init__(self, shell: Any, show: Callable[[str], None]) -> None:
        self._shell = shell
        self._show = show

    def before(self) -> None:
        """Start the watch again."""
        watch = _watch()
        if watch is not None:
            watch.begin()

    def after(self, cell: CellFact) -> None:
        """Open the valve; say what lay outside, if this cell has spilled anything worth a line."""
        watch = _watch()
        if watch is None:
            return
        from nbguard.memory.room.airbag import airbag_now
        from nbguard.memory.room.spill import Spill, names_of_spilled, spill_sentence
        from nbguard.memory.room.spill_watch import relieve
        from nbguard.memory.scan.scan import Notebook

        on, most = airbag_now(), watch.total()
        if on is None or not (most or on.spilled):
            return
        notebook = Notebook(shell=self._shell, namespace=self._shell.user_ns)
        moved, freed, reason = relieve(on, notebook, with_stale=not cell.raised)  # its error is still to be looked at
        left = on.spilled
        if max(most - watch.first, moved) < _SAID_FROM:
            return  # what lay there before was told then
        spill = Spill(
            device=on.device,
            most=most,
            moved=watch.moved + moved,
            freed=freed,
            left=left,
            holders=names_of_spilled(on.stands_for.seen_in(cell.scan.get(), notebook).facts) if left else (),
            line=watch.line,
            reason=reason,
            batch=self._batch_that_fits() if watch.stepped else None,
        )
        self._show(spill_sentence(spill, cell.number))

    def _batch_that_fits(self) -> tuple[int, int] | None:
        """Return the items of the batch of the cell's fit, and of one that would have fitted, or None if not known."""
        from nbguard.frontend.notebook.predictions import batch_of_cell
        from nbguard.frontend.notebook.session_memory import PREDICTION_SECONDS

        code = self._shell.transform_cell(self._shell.history_manager.input_hist_raw[-1])
        return batch_of_cell(code, self._shell.user_ns, PREDICTION_SECONDS)


class TurnsWatch:
    """Keeps the models within a budget after each cell, and says through `show` which took turns in it."""

    name = "the budget"
    rank = 6  # after the airbag's valve, which may park models, too

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def before(self) -> None:
        """Forget the turns of the cell before."""
        garage = _garage()
        if garage is not None:
            garage.begin()

    def after(self, cell: CellFact) -> None:
        """Park models beyond the budget now, and say which moved."""
        garage = _garage()
        if garage is None:
            return
        from nbguard.memory.room.turns import turns_sentence

        garage.keep()
        sentence = turns_sentence(garage.turns, cell.number)
        if sentence:
            self._show(sentence)


def _garage() -> Garage | None:
    loaded = sys.modules.get("nbguard.memory.room.garage")
    return None if loaded is None else loaded.garage_now()


def _watch() -> SpillWatch | None:
    loaded = sys.modules.get("nbguard.memory.room.spill_watch")
    return None if loaded is None else loaded.watch_now()
