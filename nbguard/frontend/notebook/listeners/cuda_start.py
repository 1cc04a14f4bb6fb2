"""A listener after each cell until PyTorch is imported, which has the line noted that will initialise CUDA."""

from __future__ import annotations

from collections.abc import Callable

from nbguard.memory.cells.hooks import CellFact, Listener
from nbguard.training.doctor.cuda_start import await_cuda


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
