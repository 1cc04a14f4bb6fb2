"""One IPython session: the listeners, the hub and the profile that nbguard runs in it, and the switches for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.cells.hooks import Hooks, Listener
from nbguard.errors import NbguardError
from nbguard.render.result import Result
from nbguard.reports.switches import Switches

if TYPE_CHECKING:
    from nbguard.cells.cell_scan import CellScan
    from nbguard.cells.ledger import Ledger
    from nbguard.cells.notices import NoticeWatch
    from nbguard.cleanup.plan.plan import Outcome
    from nbguard.doctor.deterministic import DeterministicSwitch
    from nbguard.memory.analysis import Analysis
    from nbguard.memory.counters import TickReading
    from nbguard.memory.simulated import Simulated
    from nbguard.notebook.foreseen_batch import ForeseenBatch
    from nbguard.notebook.listeners.foreseen_fits import ForeseenFits
    from nbguard.notebook.listeners.memory_log import MemoryLog
    from nbguard.notebook.listeners.oom_card import OomWatch
    from nbguard.notebook.listeners.simulating import Simulating
    from nbguard.notebook.profile import CellProfile
    from nbguard.out_of_memory.card import OomCard
    from nbguard.profiler.analysis.memory_log import MemoryLogState
    from nbguard.profiler.analysis.report import FitReport
    from nbguard.profiler.instruments.memory.counters import MemoryCounter
    from nbguard.profiler.options import FitOptions
    from nbguard.reports.cell_ledger import CellRecord, History
    from nbguard.reports.memory_map import MemoryMap
    from nbguard.reports.notices.notice import Notice, Notices
    from nbguard.reports.report import Report
    from nbguard.sidebar.hub.hub import Hub
    from nbguard.simulation.simulation import Simulation

_HOME = "_nbguard_live"
_FORESEEING = 5.0
"""Seconds for which a card, or a profile's report, waits for what can be foreseen."""
_KERNEL = ("session", "iopub_socket", "control_handlers", "comm_manager", "shell_stream")
"""Attributes of a kernel that a hub needs: ipykernel's have them before they start. The loop comes with the start, when the
extensions of a profile are loaded already; the hub needs it from the first message on."""
_NOTHING_YET = (
    "nothing is recorded yet: `%nbguard on` records what each cell does to the memory, `%gpumem cells on` says so "
    "after each cell, too"
)


class Session:
    """The listeners of one shell, by what the user switches on and off."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._hooks = Hooks(shell, _say)
        self._ledger: Ledger | None = None
        self._records = False
        self._auto_clean: Listener | None = None
        self._oom_watch: OomWatch | None = None
        self._foreseen: ForeseenFits | None = None
        self._foreseen_batch: ForeseenBatch | None = None
        self._notices: NoticeWatch | None = None
        self._hub: Hub | None = None
        self._simulating: Simulating | None = None
        self._profile: CellProfile | None = None
        self._memory_log: MemoryLog | None = None
        self.deterministic: DeterministicSwitch | None = None

    @property
    def switches(self) -> Switches:
        """Return what is on."""
        on = self._hooks.listeners
        ledger = self._ledger if self._ledger in on else None
        recorded = 0 if self._ledger is None else len(self._ledger.history.records)
        switches = Switches(
            oom_card=self._oom_watch in on,
            history=ledger is not None,
            cells=ledger is not None and ledger.shows,
            auto_clean_errors=self._auto_clean in on,
            notices=self._speaks,
            recorded=recorded,
        )
        if self._hub is None or self._hub not in on:
            return switches
        views, rate = self._hub.audience
        return replace(switches, sidebar=True, views=views, rate=rate, jobs=self._hub.waiting)

    @property
    def history(self) -> History:
        """Return what has been recorded; it stays when recording ends. NbguardError if nothing ever has."""
        if self._ledger is None:
            raise NbguardError(_NOTHING_YET)
        return self._ledger.history

    def watch_for_oom(self) -> None:
        """Show a card after each cell that runs out of memory."""
        if self._oom_watch is None:
            from nbguard.notebook.listeners.oom_card import OomWatch

            self._oom_watch = OomWatch(self._shell, _show_card, self._oom_after)
            self._hooks.add(self._oom_watch)

    def watch_launches(self) -> None:
        """Show the errors of the ranks after each cell whose launch of ranks has failed."""
        from nbguard.notebook.listeners.launch_card import LaunchWatch

        if not any(isinstance(listener, LaunchWatch) for listener in self._hooks.listeners):
            self._hooks.add(LaunchWatch(self._shell, _show_card))

    def watch_foreseen_fits(self) -> None:
        """Say after each fit that was foreseen on the device what came of it."""
        if self._foreseen is None:
            from nbguard.notebook.listeners.foreseen_fits import ForeseenFits

            self._foreseen = ForeseenFits(_say)
            self._hooks.add(self._foreseen)

    def watch_cuda_start(self) -> None:
        """Have the line noted that initialises CUDA, for `%nbguard doctor`."""
        from nbguard.doctor.cuda_start import await_cuda

        if not await_cuda():
            from nbguard.notebook.listeners.cuda_start import CudaStartWatch

            self._hooks.add(CudaStartWatch(self._hooks.remove))

    def speak_up(self, *, on: bool = True) -> Notices:
        """Show a line after each cell that leaves something in memory, or no longer; return what has been noticed so far."""
        if on:
            if self._notices is None:
                from nbguard.cells.notices import NoticeWatch

                self._notices = NoticeWatch(self._shell, self._show_notice, lambda: self._hooks.source, self._hooks.counters)
            self._notices.speak()
            if not self._speaks:
                self._hooks.add(self._notices)
        elif self._notices is not None:
            self._remove(self._notices)
            self._notices.forget_names()
        return self.notices

    @property
    def notices(self) -> Notices:
        """Return what has been noticed so far; it stays when notices are switched off."""
        from nbguard.reports.notices.notice import Notices

        return Notices(notices=(), on=False) if self._notices is None else self._notices.made(on=self._speaks)

    def _current_notices(self) -> tuple[Notice, ...]:
        """Return the notices on what is still in memory, for sidebars."""
        return () if self._notices is None else self._notices.current()

    @property
    def _speaks(self) -> bool:
        return self._notices is not None and self._notices in self._hooks.listeners

    def be_quiet(self, *names: str) -> Notices:
        """Show no notices about these names; without any, none at all."""
        if self._notices is not None:
            self._notices.be_quiet(*names)
        return self.notices

    def expect_cleanup(self) -> None:
        """Make no notice of what a cleanup in the cell that runs leaves: it says so itself."""
        if self._notices is not None:
            self._notices.expect_cleanup()

    @property
    def hub(self) -> Hub | None:
        """Return the hub that serves the sidebars; None if there is none."""
        return self._hub

    def serve_sidebars(self) -> Hub | None:
        """Answer sidebars from now on; return the hub. None where there can be none: the shell is not that of an ipykernel."""
        kernel = getattr(self._shell, "kernel", None)
        if self._hub is None and all(getattr(kernel, name, None) is not None for name in _KERNEL):
            from nbguard.sidebar.hub.hub import Hub

            self._hub = Hub(self._shell, self._simulated, self._next_fit, self._current_notices, self._recall_batch)
            self._hooks.add(self._hub)
        return self._hub

    def _next_fit(self, name: str) -> str:
        """Return the memory of the next fit of the Learner of a name."""
        from nbguard.notebook.foreseen_row import foreseen_row

        return foreseen_row(self._shell.user_ns, name)

    def turn_on(self, *, auto_clean_errors: bool) -> Switches:
        """Record the cells; clean after failed ones, or do not."""
        self.watch_for_oom()
        self.watch_foreseen_fits()
        self.speak_up()
        self.serve_sidebars()
        self._records = True
        self._run_ledger(shows=self.switches.cells)
        self._remove(self._auto_clean)
        self._auto_clean = None
        if auto_clean_errors:
            from nbguard.notebook.listeners.auto_clean import AutoClean

            self._auto_clean = AutoClean(self._shell, _show_released)
            self._hooks.add(self._auto_clean)
        return self.switches

    def turn_off(self) -> Switches:
        """Take every listener off. What has been recorded stays until the extension is unloaded."""
        self._records = False
        self.stop_logging()
        self.stop_simulating()
        for listener in self._hooks.listeners:
            self._hooks.remove(listener)
        if self._oom_watch is not None:
            self._oom_watch.end()
            self._oom_watch = None
        self._foreseen = None
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        return self.switches

    @property
    def simulation(self) -> Simulation | None:
        """Return the simulated device on which the cells run; None if they do not."""
        listener = self._simulating
        return None if listener is None or listener not in self._hooks.listeners else listener.simulation

    def _simulated(self) -> TickReading | None:
        """Return the counters of the simulated device, from any thread; None while cells run on no such."""
        simulation = self.simulation
        return None if simulation is None else simulation.reading()

    def simulate(self, simulation: Simulation) -> None:
        """Run the cells that follow on a simulated device."""
        from nbguard.notebook.listeners.simulating import Simulating

        self.stop_simulating()
        self._simulating = Simulating(simulation, _show_simulated, _say)
        self._hooks.add(self._simulating)

    def stop_simulating(self) -> Simulation | None:
        """Run no further operation on a simulated device; return the one that ends, if any."""
        simulation = self.simulation
        if self._simulating is not None:
            self._simulating.end()
            self._remove(self._simulating)
            self._simulating = None
        return simulation

    def profile(self, options: FitOptions, keep: Callable[[FitReport], None]) -> None:
        """Profile what the cell that runs now does from here on; when it ends, show the report and hand it to `keep`."""
        from nbguard.notebook.foreseen_remedies import with_foreseen_bytes
        from nbguard.notebook.profile import CellProfile, show
        from nbguard.profiler.profile import FitProfile

        def ended(report: FitReport, code: str) -> None:
            names = self._shell.user_ns
            report = with_foreseen_bytes(report, self._shell.transform_cell(code), names, _FORESEEING)
            keep(report)
            show(report)

        self._profile = CellProfile(self._shell, FitProfile(options, self._counter()), ended, _say)

    def _counter(self) -> MemoryCounter | None:
        """Return the memory counter of the simulated device while one is on; None: torch's or malloc's is used."""
        if self.simulation is None:
            return None
        from nbguard.profiler.instruments.memory.counters import SimulatedCounter

        return SimulatedCounter(self.simulation)

    def stop_profiling(self) -> None:
        """Take a profile that still runs down, without a report."""
        if self._profile is not None:
            self._profile.cancel()
            self._profile = None

    def report(self) -> Report:
        """Return who holds the memory of the devices, or of the simulated one while that is on."""
        from nbguard import api

        return api.report() if self.simulation is None else self.simulation.report()

    def memory_map(self, request: int | str | None) -> MemoryMap:
        """Return the map of the devices, or of the simulated one while that is on. NbguardError for a size that is none."""
        from nbguard import api

        if self.simulation is None:
            return api.memory_map(request)
        return self.simulation.memory_map(api.request_bytes(request))

    def oom(self) -> OomCard | None:
        """Return the card on the last error, if it ran out of memory: of a simulated device, too."""
        if self.simulation is not None:
            return self.simulation.oom()
        from nbguard.scan.scan import Notebook, scan

        notebook = Notebook.current(None)
        return self._card(scan(notebook).analysis, 2 * _FORESEEING)

    def _card(self, analysis: Analysis, seconds: float) -> OomCard | None:
        """Return the card on the last error, with a batch that fits where one can be foreseen in so many seconds."""
        from nbguard.notebook.foreseen_batch import ForeseenBatch
        from nbguard.out_of_memory.card import build_card

        if self._foreseen_batch is None:
            self._foreseen_batch = ForeseenBatch()
        self._foreseen_batch.foresee(analysis, self._shell.user_ns, seconds)
        return analysis.once(build_card)

    def _recall_batch(self, analysis: Analysis) -> None:
        """Tell an analysis the batch that was foreseen for a card on the same failure."""
        if self._foreseen_batch is not None:
            self._foreseen_batch.recall(analysis)

    def _oom_after(self, scan: CellScan) -> OomCard | None:
        """Return what `oom` does, of the cell that has just ended."""
        return self._card(scan.get().analysis, _FORESEEING) if self.simulation is None else self.simulation.oom()

    def show_cells(self, *, on: bool) -> Switches:
        """Say after each cell what it changed, or say it no longer."""
        if on or self._records or self._memory_log is not None:
            self._run_ledger(shows=on)
        else:
            self._remove(self._ledger)
        return self.switches

    @property
    def memory_log(self) -> MemoryLogState:
        """Return where the memory is logged."""
        from nbguard.profiler.analysis.memory_log import MemoryLogState

        return MemoryLogState() if self._memory_log is None else self._memory_log.state

    def log_memory(self, specs: tuple[str, ...], every: float) -> MemoryLogState:
        """Write the memory to these logs after each cell from now on, in the place of those before.

        Raises:
            NbguardError: one of them cannot be written to; then nothing has changed.
        """
        from nbguard.notebook.listeners.memory_log import MemoryLog

        log = MemoryLog(self._made_ledger(), specs, every, _say)
        shows = self.switches.cells
        self.stop_logging()
        self._run_ledger(shows=shows)
        self._memory_log = log
        self._hooks.add(log)
        return log.state

    def stop_logging(self) -> MemoryLogState:
        """Close the logs; the ledger goes on only where something else needs it."""
        if self._memory_log is not None:
            self._memory_log.close()
            self._remove(self._memory_log)
            self._memory_log = None
            if not self._records and not self.switches.cells:
                self._remove(self._ledger)
        return self.memory_log

    def _show_notice(self, notice: Notice) -> None:
        """Show a notice, unless it is of an error whose memory the line of the cell names, or which is cleaned up by itself."""
        switches = self.switches
        if notice.kind != "error" or not (switches.cells or switches.auto_clean_errors):
            _show_notice(notice)

    def _made_ledger(self) -> Ledger:
        """Return the ledger, which need not run."""
        from nbguard.cells.ledger import Ledger

        self._ledger = self._ledger or Ledger(self._shell, _show_line, self._hooks.counters)
        return self._ledger

    def _run_ledger(self, *, shows: bool) -> None:
        ledger = self._made_ledger()
        if ledger not in self._hooks.listeners:
            ledger.start(shows=shows)
            self._hooks.add(ledger)
        elif ledger.shows != shows:
            ledger.show_lines(on=shows)

    def _remove(self, listener: Listener | None) -> None:
        if listener is not None:
            self._hooks.remove(listener)


def session_of(shell: Any) -> Session:
    """Return the session of a shell; a new one, with nothing on, if it has none."""
    session: Session = shell.__dict__.setdefault(_HOME, Session(shell))
    return session


def hub_of(shell: Any) -> Hub | None:
    """Return what serves the sidebars of a shell; None if nothing does."""
    session = None if shell is None else shell.__dict__.get(_HOME)
    return None if session is None else session.hub


def close(shell: Any) -> None:
    """Take everything off and forget it."""
    session = shell.__dict__.pop(_HOME, None)
    if session is not None:
        session.turn_off()
        session.stop_profiling()
        if session.deterministic is not None:
            session.deterministic.undo()
    recorder = sys.modules.get("nbguard.cleanup.apply.allocator_history")
    if recorder is not None:
        recorder.stop()


def history() -> History:
    """Return what each cell did to the memory since `%nbguard on` or `%gpumem cells on`: plain frozen records.

    Raises:
        NbguardError: nothing has been recorded, or this is no IPython session.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        raise NbguardError("this is no IPython session: there are no cells to record")
    return session_of(shell).history


def notices() -> tuple[Notice, ...]:
    """Return what nbguard has noticed in this kernel, a record for each cause: plain frozen data.

    Raises:
        NbguardError: this is no IPython session.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        raise NbguardError("this is no IPython session: there are no cells after which something could be noticed")
    return session_of(shell).notices.notices


def _show_card(card: Result) -> None:
    from nbguard.notebook.bundle import display_bundle

    display_bundle(card.mimebundle())


def _say(sentence: str) -> None:
    from nbguard.notebook.bundle import display_bundle, line_bundle

    display_bundle(line_bundle(sentence))


def _show_line(record: CellRecord) -> None:
    from nbguard.reports.cell_lines import cell_line

    _say(cell_line(record))


def _show_notice(notice: Notice) -> None:
    from nbguard.reports.notices.view import notice_line

    _say(notice_line(notice))


def _show_released(outcome: Outcome, cell: int) -> None:
    from nbguard.reports.cell_lines import released_line

    _say(released_line(outcome, cell))


def _show_simulated(before: Simulated, after: Simulated, cell: int) -> None:
    from nbguard.memory.views.simulated import cell_line

    _say(cell_line(before, after, cell))
