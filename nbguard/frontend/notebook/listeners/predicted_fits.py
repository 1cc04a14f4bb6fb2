"""One line after a cell with a predicted fit, which puts the predicted peaks next to the measured ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbguard.memory.cells.hooks import CellFact


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
