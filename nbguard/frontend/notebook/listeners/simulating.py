"""`%gpumem simulate 16GiB`: the cells that follow run on a simulated device, and say what they did to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.core.simulated import Simulated

if TYPE_CHECKING:
    from nbguard.memory.simulation.simulation import Simulation


class Simulating:
    """Enters a simulation before each cell and leaves it after.

    Args:
        simulation: the simulated device.
        say: shows a sentence.
    """

    name = "the simulated device"
    rank = 0  # left before the others look at the cell

    def __init__(self, simulation: Simulation, say: Callable[[str], None]) -> None:
        self.simulation = simulation
        self._say = say

    def before(self) -> None:
        """Put the cell on the simulated device."""
        if not self.simulation.is_running:
            self.simulation.__enter__()

    def after(self, cell: CellFact) -> None:
        """Take the operations that follow off it, and answer code that asked for a real GPU."""
        self.end()
        if cell.raised:
            self._answer(getattr(sys, "last_value", None))

    def _answer(self, error: BaseException | None) -> None:
        from nbguard.memory.simulation.simulation import INSTEAD_OF_CUDA, asked_for_cuda

        if error is not None and asked_for_cuda(error):
            self._say(INSTEAD_OF_CUDA)

    def end(self) -> None:
        """Let the operations that follow run without it."""
        self.simulation.__exit__(None, None, None)


class SimulatedChanges:
    """Shows a cell's changes of a simulated device.

    Args:
        simulation: the simulated device.
        show: shows the changes by the figures (before, after) and the cell's number.
    """

    name = "the simulated device"
    rank = 7  # after the airbag's valve and the budget, which move memory when the cell has ended

    def __init__(self, simulation: Simulation, show: Callable[[Simulated, Simulated, int], None]) -> None:
        self._simulation = simulation
        self._show = show
        self._shown = simulation.figures()

    def before(self) -> None:
        """Do nothing."""

    def after(self, cell: CellFact) -> None:
        """Show the changes since the cell before, if there are any."""
        before, self._shown = self._shown, self._simulation.figures()
        if self._shown != before:
            self._show(before, self._shown, cell.number)
