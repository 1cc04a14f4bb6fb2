"""The memory that a session reports on, the devices' or the simulated one's, and the switch of notices after cells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbguard.frontend.notebook.display import show_sentence, show_simulated
from nbguard.memory.cleanup.apply.released_names import listeners

if TYPE_CHECKING:
    from nbguard.frontend.notebook.listeners.simulating import SimulatedChanges, Simulating
    from nbguard.frontend.notebook.predictions import PredictedBatch
    from nbguard.memory.cells.hooks import CellScan, Hooks
    from nbguard.memory.cells.notices import NoticeWatch
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.facts import TickReading
    from nbguard.memory.core.oom_facts import AllocatorCounts
    from nbguard.memory.core.references.explain import Why
    from nbguard.memory.out_of_memory.card import OomCard
    from nbguard.memory.reports.memory_map import MemoryMap
    from nbguard.memory.reports.notices.notice import Notice, Notices
    from nbguard.memory.reports.report import Report
    from nbguard.memory.simulation.simulation import Simulation
    from nbguard.memory.snapshots.moment import RecordedHistory
    from nbguard.training.profiler.instruments.memory_counters import MemoryCounter


# --- The switch of notices, lines after cells that leave deleted, rebound or piled-up objects in memory.


class NoticeSwitch:
    """Notices of one session, on or off.

    Args:
        shell: of the session.
        hooks: of the session.
        show: shows a notice.
    """

    def __init__(self, shell: Any, hooks: Hooks, show: Callable[[Notice], None]) -> None:
        self._shell = shell
        self._hooks = hooks
        self._show = show
        self._watch: NoticeWatch | None = None

    @property
    def is_on(self) -> bool:
        """Say whether notices are made."""
        return self._watch is not None and self._watch in self._hooks.listeners

    @property
    def notices(self) -> Notices:
        """Return the notices so far; they stay when notices are switched off."""
        from nbguard.memory.reports.notices.notice import Notices

        return Notices(notices=(), on=False) if self._watch is None else self._watch.made(on=self.is_on)

    def current(self, analysis: Analysis) -> tuple[Notice, ...]:
        """Return the notices that hold by a scan made now, for sidebars."""
        return () if self._watch is None else self._watch.current(analysis)

    def why(self, name: str) -> Why | None:
        """Return the remains of the object that a deleted name was bound to, or None if it is unknown."""
        return None if self._watch is None or not self.is_on else self._watch.why(name)

    def turn_on(self) -> None:
        """Make notices from now on, about all names."""
        if self._watch is None:
            from nbguard.memory.cells.notices import NoticeWatch

            self._watch = NoticeWatch(self._shell, self._show, lambda: self._hooks.source, self._hooks.counters)
        self._watch.speak()
        if not self.is_on:
            self._hooks.add(self._watch)
            listeners.append(self._watch.release)

    def turn_off(self) -> None:
        """Make no notices."""
        if self._watch is not None:
            self._hooks.remove(self._watch)
            listeners[:] = [listener for listener in listeners if listener != self._watch.release]
            self._watch.forget_names()

    def be_quiet(self, *names: str) -> None:
        """Show no notices about these names; without any, none at all."""
        if self._watch is not None:
            self._watch.be_quiet(*names)

    def expect_cleanup(self) -> None:
        """Make no notice of the leftovers of a cleanup in the current cell, as it tells them itself."""
        if self._watch is not None:
            self._watch.expect_cleanup()


PREDICTION_SECONDS = 5.0
"""Most seconds that displays after a cell wait for a prediction; a card on request waits twice as long."""


class SessionMemory:
    """Reports of one session, each of the device on which its cells run."""

    def __init__(self, shell: Any, hooks: Hooks) -> None:
        self._shell = shell
        self._hooks = hooks
        self._simulating: Simulating | None = None
        self._changes: SimulatedChanges | None = None
        self._predicted_batch: PredictedBatch | None = None
        self._thread = threading.get_ident()  # the cells' own, which alone may ask the simulated device for its blocks

    @property
    def simulation(self) -> Simulation | None:
        """Return the simulated device on which the cells run; None if they do not."""
        listener = self._simulating
        return None if listener is None or listener not in self._hooks.listeners else listener.simulation

    def simulate(self, simulation: Simulation) -> None:
        """Run the cells that follow on a simulated device."""
        from nbguard.frontend.notebook.listeners.simulating import SimulatedChanges, Simulating

        self.stop_simulating()
        self._simulating = Simulating(simulation, show_sentence)
        self._changes = SimulatedChanges(simulation, show_simulated)
        self._hooks.add(self._simulating)
        self._hooks.add(self._changes)

    def stop_simulating(self) -> Simulation | None:
        """Run no further operation on a simulated device; return the one that ends, if any."""
        simulation = self.simulation
        if self._simulating is not None and self._changes is not None:
            self._simulating.end()
            self._simulating.simulation.end()
            self._hooks.remove(self._simulating)
            self._hooks.remove(self._changes)
            self._simulating = self._changes = None
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
        from nbguard.training.profiler.instruments.memory_counters import SimulatedCounter

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
        from nbguard.memory.scan.pause import keep_garbage

        self.recall_card(analysis)
        with keep_garbage():
            return build_report(analysis)

    def memory_map(self, request: int | str | None) -> MemoryMap:
        """Return the map of the memory. NbguardError for a size that is none."""
        from nbguard import api

        if self.simulation is None:
            return api.memory_map(request)
        return self.simulation.memory_map(api.request_bytes(request))

    def recorded_history(self) -> RecordedHistory:
        """Return the allocator's history, of the simulated device while cells run on it."""
        from nbguard.memory.snapshots.save import live_history

        return live_history(simulation=self.simulation)

    def oom(self) -> OomCard | None:
        """Return the card on the last error, if it ran out of memory."""
        from nbguard.memory.scan.scan import Notebook, scan

        return self._card(scan(Notebook.current(None)).analysis, 2 * PREDICTION_SECONDS)

    def oom_after(self, scan: CellScan) -> OomCard | None:
        """Return the same as `oom`, for the cell that just ended."""
        return self._card(scan.get().analysis, PREDICTION_SECONDS)

    def _card(self, analysis: Analysis, seconds: float) -> OomCard | None:
        """Return the card on the last error, with a batch that fits where one can be predicted in so many seconds."""
        from nbguard.frontend.notebook.predictions import PredictedBatch
        from nbguard.memory.out_of_memory.card import build_card

        if self.simulation is None:
            if self._predicted_batch is None:
                self._predicted_batch = PredictedBatch()
            self._predicted_batch.predict(analysis, self._shell.user_ns, seconds)
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
        elif self._predicted_batch is not None:
            self._predicted_batch.recall(analysis)
        if self.simulation is None and oom.device == DEVICE:
            analysis.know(build_card, None)  # that device is gone, and the error with it
