"""`%gpumem simulate 16GiB`: the cells that follow run on a simulated device, and say what they did to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbguard.cells.hooks import CellFact
from nbguard.memory.simulated import Simulated

if TYPE_CHECKING:
    from nbguard.simulation.simulation import Simulation


class Simulating:
    """Enters a simulation before each cell and leaves it after; hands (before, after, cell) to `show` where it changed."""

    name = "the simulated device"
    rank = 0  # left before the others look at the cell

    def __init__(self, simulation: Simulation, show: Callable[[Simulated, Simulated, int], None]) -> None:
        self.simulation = simulation
        self._show = show
        self._shown = simulation.figures()

    def before(self) -> None:
        """Put the cell on the simulated device."""
        if not self.simulation.is_running:
            self.simulation.__enter__()

    def after(self, cell: CellFact) -> None:
        """Take what follows off it, and say what the cell did."""
        self.end()
        before, self._shown = self._shown, self.simulation.figures()
        if self._shown != before:
            self._show(before, self._shown, cell.number)

    def end(self) -> None:
        """Let the operations that follow run without it."""
        self.simulation.__exit__(None, None, None)
