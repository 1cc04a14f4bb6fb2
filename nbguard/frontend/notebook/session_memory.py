"""The memory that a session reports on: the devices' or, while the cells run on it, the simulated one's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbguard.frontend.notebook.display import show_sentence, show_simulated

if TYPE_CHECKING:
    from nbguard.frontend.notebook.foreseen_batch import ForeseenBatch
    from nbguard.frontend.notebook.listeners.simulating import Simulating
    from nbguard.memory.cells.cell_scan import CellScan
    from nbguard.memory.cells.hooks import Hooks
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.counters import TickReading
    from nbguard.memory.core.oom_facts import AllocatorCounts
    from nbguard.memory.out_of_memory.card import OomCard
    from nbguard.memory.reports.memory_map import MemoryMap
    from nbguard.memory.reports.report import Report
    from nbguard.memory.simulation.simulation import Simulation
    from nbguard.training.profiler.instruments.memory.counters import MemoryCounter

PREDICTION_SECONDS = 5.0
"""Most seconds that displays after a cell wait for a prediction; a card on request waits twice as long."""


class SessionMemory:
    """Reports of one session, each of the device on which its cells run."""

    def __init__(self, shell: Any, hooks: Hooks) -> None:
        self._shell = shell
        self._hooks = hooks
        self._simulating: Simulating | None = None
        self._foreseen_batch: ForeseenBatch | None = None
        self._thread = threading.get_ident()  # the cells' own, which alone may ask the simulated device for its blocks

    @property
    def simulation(self) -> Simulation | None:
        """Return the simulated device on which the cells run; None if they do not."""
        listener = self._simulating
        return None if listener is None or listener not in self._hooks.listeners else listener.simulation

    def simulate(self, simulation: Simulation) -> None:
        """Run the cells that follow on a simulated device."""
        from nbguard.frontend.notebook.listeners.simulating import Simulating

        self.stop_simulating()
        self._simulating = Simulating(simulation, show_simulated, show_sentence)
        self._hooks.add(self._simulating)

    def stop_simulating(self) -> Simulation | None:
        """Run no further operation on a simulated device; return the one that ends, if any."""
        simulation = self.simulation
        if self._simulating is not None:
            self._simulating.end()
            self._hooks.remove(self._simulating)
            self._simulating = None
        return simulation

    def simulated_reading(self) -> TickReading | None:
        """Return the counters of the simulated device, from any thread; None while cells run on no such."""
        simulation = self.simulation
        return None if simulation is None else simulation.reading()

    def simulated_counts(self) -> dict[str, AllocatorCounts]:
        """Return the counters of the simulated device's allocator by its name; none while cells run on no such."""
        if self.simulation is None:
            return {}
        from nbguard.memory.core.simulated import DEVICE

        return {DEVICE: self.simulation.counts()}

    def simulated_counter(self) -> MemoryCounter | None:
        """Return the memory counter of the simulated device for a profile; None while cells run on no such."""
        if self.simulation is None:
            return None
        from nbguard.training.profiler.instruments.memory.counters import SimulatedCounter

        return SimulatedCounter(self.simulation)

    def report(self) -> Report:
        """Return who holds the memory."""
        if self.simulation is not None:
            return self.simulation.report()
        from nbguard.memory.scan.scan import Notebook, scan

        return self._report(scan(Notebook.current(None)).analysis)

    def report_after(self, scan: CellScan) -> Report:
        """Return the same as `report`, for the cell that just ended."""
        return self._report(scan.get().analysis) if self.simulation is None else self.simulation.report()

    def _report(self, analysis: Analysis) -> Report:
        """Return the report, whose findings know the batch that was predicted for the card."""
        from nbguard.memory.reports.report import build_report

        self.recall_card(analysis)
        return build_report(analysis)

    def memory_map(self, request: int | str | None) -> MemoryMap:
        """Return the map of the memory. NbguardError for a size that is none."""
        from nbguard import api

        if self.simulation is None:
            return api.memory_map(request)
        return self.simulation.memory_map(api.request_bytes(request))

    def oom(self) -> OomCard | None:
        """Return the card on the last error, if it ran out of memory."""
        from nbguard.memory.scan.scan import Notebook, scan

        return self._card(scan(Notebook.current(None)).analysis, 2 * PREDICTION_SECONDS)

    def oom_after(self, scan: CellScan) -> OomCard | None:
        """Return the same as `oom`, for the cell that just ended."""
        return self._card(scan.get().analysis, PREDICTION_SECONDS)

    def _card(self, analysis: Analysis, seconds: float) -> OomCard | None:
        """Return the card on the last error, with a batch that fits where one can be predicted in so many seconds."""
        from nbguard.frontend.notebook.foreseen_batch import ForeseenBatch
        from nbguard.memory.out_of_memory.card import build_card

        if self.simulation is None:
            if self._foreseen_batch is None:
                self._foreseen_batch = ForeseenBatch()
            self._foreseen_batch.foresee(analysis, self._shell.user_ns, seconds)
        self.recall_card(analysis)
        return analysis.once(build_card)

    def recall_card(self, analysis: Analysis) -> None:
        """Have an analysis give the same card on the last error as every other: of the device on which its cell ran."""
        oom = analysis.facts.oom
        if oom is None:
            return
        from nbguard.memory.core.simulated import DEVICE
        from nbguard.memory.out_of_memory.card import build_card

        if self.simulation is not None and threading.get_ident() == self._thread:
            analysis.know(build_card, self.simulation.card(analysis.facts))
        elif self._foreseen_batch is not None:
            self._foreseen_batch.recall(analysis)
        if self.simulation is None and oom.device == DEVICE:
            analysis.know(build_card, None)  # that device is gone, and the error with it
