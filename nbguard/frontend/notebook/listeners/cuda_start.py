"""A listener after each cell until PyTorch is imported, which has the line noted that will initialise CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbguard.memory.cells.hooks import CellFact, Listener
from nbguard.training.doctor.cuda_start import await_cuda

# --- One line after a cell with a predicted fit, which puts the predicted peaks next to the measured ones.


class PredictedFits:
    """Hands a sentence to `say` after each cell with a predicted fit. Any other cell costs one lookup in a dictionary."""

    name = "prediction compared with real memory"
    rank = 20

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def before(self) -> None:
        """Do nothing: counters go on by themselves."""

    def after(self, cell: CellFact) -> None:  # noqa: ARG002 - the figures are the device's
        """Say what came of a prediction."""
        calibration: Any = sys.modules.get("nbguard.training.prediction.calibration")
        if calibration is None:
            return
        for sentence in calibration.outcomes():
            self._say(sentence)


class CudaStartWatch:
    """Waits until PyTorch is imported, then takes itself off by `remove`."""

    name = "the start of CUDA"
    rank = 5

    def __init__(self, remove: Callable[[Listener], None]) -> None:
        self._remove = remove

    def before(self) -> None:
        """Nothing is to be done before a cell."""

    def after(self, cell: CellFact) -> None:
        """Look whether PyTorch has been imported."""
        if await_cuda(cell.number):
            self._remove(self)
