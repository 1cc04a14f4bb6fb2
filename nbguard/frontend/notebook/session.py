"""One IPython session: nbguard's listeners around its cells, and their switches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.display import show_card, show_notice, show_released, show_sentence
from nbguard.frontend.notebook.recording import CellRecording
from nbguard.frontend.notebook.session_memory import PREDICTION_SECONDS, NoticeSwitch, SessionMemory
from nbguard.memory.cells.hooks import Hooks, Listener
from nbguard.memory.reports.switches import Switches
from nbguard.processor_time import thread_time_ns

if TYPE_CHECKING:
    from nbguard.frontend.notebook.assistants import AssistantSwitch
    from nbguard.frontend.notebook.listeners.airbag import PredictedFits
    from nbguard.frontend.notebook.listeners.oom_card import OomWatch
    from nbguard.frontend.notebook.listeners.saved_pictures import SavedPictures, ShownSidebar
    from nbguard.frontend.notebook.profile import CellProfile
    from nbguard.frontend.sidebar.hub.hub import Hub
    from nbguard.memory.reports.cell_ledger import History
    from nbguard.memory.reports.notices.notice import Notice
    from nbguard.training.doctor.deterministic import DeterministicSwitch
    from nbguard.training.profiler.analysis.report import FitReport
    from nbguard.training.profiler.options import FitOptions

_HOME = "_nbguard_live"
_KERNEL = ("session", "iopub_socket", "control_handlers", "comm_manager", "shell_stream")
"""Attributes of a kernel that a hub needs: ipykernel's have them before they start. The loop comes with the start, when the
extensions of a profile are loaded already; the hub needs it from the first message on."""


class Session:
    """The parts of nbguard that run in one shell.

    Attributes:
        recording: the record of each cell's changes of the memory.
        notices: the lines on memory that cells leave.
        memory: the reports, of the devices or of the simulated one.
        deterministic: the settings of `%nbguard fix determinism`, or None.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._hooks = Hooks(shell, show_sentence)
        self.recording: CellRecording = CellRecording(shell, self._hooks)
        self.notices: NoticeSwitch = NoticeSwitch(shell, self._hooks, self._show_notice)
        self.memory: SessionMemory = SessionMemory(shell, self._hooks)
        self.deterministic: DeterministicSwitch | None = None
        self._auto_clean: Listener | None = None
        self._oom_watch: OomWatch | None = None
        self._predicted: PredictedFits | None = None
        self._saved_pictures: SavedPictures | None = None
        self._hub: Hub | None = None
        self._profile: CellProfile | None = None
        self._assistants: AssistantSwitch | None = None

    @property
    def switches(self) -> Switches:
        """Return the state of the switches."""
        from nbguard.memory.scan.heap import native

        on = self._hooks.listeners
        switches = Switches(
            oom_card=self._oom_watch in on,
            history=self.recording.is_on,
            cells=self.recording.shows,
            auto_clean_errors=self._auto_clean in on,
            notices=self.notices.is_on,
            assistants=self._assistants is not None and self._assistants.is_on,
            recorded=self.recording.count,
            compiled_walk=native.compiled is not None,
            why_pure=native.why_pure,
        )
        if self._hub is None or self._hub not in on:
            return switches
        views, rate = self._hub.audience
        return replace(switches, sidebar=True, views=views, rate=rate, jobs=self._hub.waiting)

    def watch(self) -> None:
        """Start the features that run from loading on: cards, notices and sidebars, without a record of the cells."""
        self._watch_for_oom()
        self._watch_airbag()
        self._watch_launches()
        self._watch_predicted_fits()
        self.notices.turn_on()
        self.serve_sidebars()
        self._watch_cuda_start()

    def turn_on(self, *, auto_clean_errors: bool) -> Switches:
        """Record the cells; clean after failed ones, or do not."""
        self._watch_for_oom()
        self._watch_airbag()
        self._watch_predicted_fits()
        self.notices.turn_on()
        self.serve_sidebars()
        self.recording.start()
        if self._auto_clean is not None:
            self._hooks.remove(self._auto_clean)
            self._auto_clean = None
        if auto_clean_errors:
            from nbguard.frontend.notebook.listeners.auto_clean import AutoClean

            self._auto_clean = AutoClean(self._shell, show_released)
            self._hooks.add(self._auto_clean)
        return self.switches

    def turn_off(self) -> Switches:
        """Take every listener off. The records stay until the extension is unloaded."""
        self.recording.end()
        self.memory.stop_simulating()
        for listener in self._hooks.listeners:
            self._hooks.remove(listener)
        if self._oom_watch is not None:
            self._oom_watch.end()
            self._oom_watch = None
        self._predicted = self._saved_pictures = None
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        if self._assistants is not None:
            self._assistants.turn_off()
        return self.switches

    @property
    def assistants(self) -> AssistantSwitch:
        """Return the switch that opens this kernel to assistants; it is off at first."""
        if self._assistants is None:
            from nbguard.frontend.notebook.assistants import AssistantSwitch

            self._assistants = AssistantSwitch(self._shell, self.memory, self.notices)
        return self._assistants

    @property
    def hub(self) -> Hub | None:
        """Return the hub that serves the sidebars; None if there is none."""
        return self._hub

    def serve_sidebars(self) -> Hub | None:
        """Answer sidebars from now on; return the hub. None where there can be none: the shell is not that of an ipykernel."""
        kernel = getattr(self._shell, "kernel", None)
        if self._hub is None and all(getattr(kernel, name, None) is not None for name in _KERNEL):
            from nbguard.frontend.sidebar.hub.hub import Hub

            self._hub = Hub(
                self._shell,
                self.memory.simulated_reading,
                self._next_fit,
                self.notices.current,
                self.memory.recall_card,
                self.memory.recorded_history,
            )
            self._hooks.add(self._hub)
        return self._hub

    def keep_picture(self, sidebar: ShownSidebar) -> None:
        """Keep the picture in a sidebar's output that of the last cell's end, while no sidebar is open."""
        if self._saved_pictures is None:
            from nbguard.frontend.notebook.listeners.saved_pictures import SavedPictures

            self._saved_pictures = SavedPictures(lambda: bool(self.switches.views), self.memory.report_after)
            self._hooks.add(self._saved_pictures)
        self._saved_pictures.keep(sidebar)

    def _next_fit(self, name: str) -> str:
        """Return the memory of the next fit of the Learner of a name."""
        from nbguard.frontend.notebook.predictions import prediction_row

        return prediction_row(self._shell.user_ns, name)

    def profile(self, options: FitOptions, keep: Callable[[FitReport], None], *, whole: bool) -> None:
        """Profile the rest of the current cell; when it ends, show the report and hand it to `keep`.

        `whole`: whether all figures stand open.
        """
        begun = thread_time_ns()
        from nbguard.memory.scan.pause import keep_garbage

        with keep_garbage():  # a collection of all objects takes longer than to import
            from nbguard.frontend.notebook.profile import CellProfile, show
            from nbguard.training.profiler.profile import FitProfile

        def ended(report: FitReport, code: str) -> None:
            if any(remedy.kind for remedy in report.remedies):
                from nbguard.frontend.notebook.predictions import with_predicted_bytes

                names = self._shell.user_ns
                report = with_predicted_bytes(report, self._shell.transform_cell(code), names, PREDICTION_SECONDS)
            keep(report)
            show(report, whole=whole)

        profile = FitProfile(options, self.memory.simulated_counter(), spent=thread_time_ns() - begun)
        self._profile = CellProfile(self._shell, profile, ended, show_sentence)

    def stop_profiling(self) -> None:
        """Take a profile that still runs down, without a report."""
        if self._profile is not None:
            self._profile.cancel()
            self._profile = None

    def _watch_for_oom(self) -> None:
        """Show a card after each cell that runs out of memory."""
        if self._oom_watch is None:
            from nbguard.frontend.notebook.listeners.oom_card import OomWatch

            self._oom_watch = OomWatch(self._shell, show_card, self.memory.oom_after, self.memory.simulated_counts)
            self._hooks.add(self._oom_watch)

    def _watch_airbag(self) -> None:
        """Bring back the bytes that a cell has spilled to the airbag, keep models within a budget, and say so after it."""
        from nbguard.frontend.notebook.listeners.airbag import AirbagWatch, TurnsWatch

        if not any(isinstance(listener, AirbagWatch) for listener in self._hooks.listeners):
            self._hooks.add(AirbagWatch(self._shell, show_sentence))
            self._hooks.add(TurnsWatch(show_sentence))

    def _watch_launches(self) -> None:
        """Show the errors of the ranks after each cell whose launch of ranks failed."""
        from nbguard.frontend.notebook.listeners.failed_launch import LaunchWatch

        if not any(isinstance(listener, LaunchWatch) for listener in self._hooks.listeners):
            self._hooks.add(LaunchWatch(self._shell, show_card, show_sentence))

    def _watch_predicted_fits(self) -> None:
        """Tell the outcome after each fit that was predicted on the device."""
        if self._predicted is None:
            from nbguard.frontend.notebook.listeners.airbag import PredictedFits

            self._predicted = PredictedFits(show_sentence)
            self._hooks.add(self._predicted)

    def _watch_cuda_start(self) -> None:
        """Have the line noted that initialises CUDA, for `%nbguard doctor`."""
        from nbguard.training.doctor.cuda_start import await_cuda

        if not await_cuda():
            from nbguard.frontend.notebook.listeners.cuda_start import CudaStartWatch

            self._hooks.add(CudaStartWatch(self._hooks.remove))

    def _show_notice(self, notice: Notice) -> None:
        """Show a notice, unless it is of an error whose memory the line of the cell names, or which is cleaned up by itself."""
        switches = self.switches
        if notice.kind != "error" or not (switches.cells or switches.auto_clean_errors):
            show_notice(notice)


def session_of(shell: Any) -> Session:
    """Return the session of a shell; a new one, with nothing on, if it has none."""
    session: Session | None = shell.__dict__.get(_HOME)
    if session is None:
        session = shell.__dict__[_HOME] = Session(shell)
    return session


def hub_of(shell: Any) -> Hub | None:
    """Return the hub that serves the sidebars of a shell, or None."""
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
    recorder = sys.modules.get("nbguard.memory.cleanup.apply.allocator_history")
    if recorder is not None:
        recorder.stop()


def history() -> History:
    """Return each cell's change of the memory since `%nbguard on` or `%gpumem cells on`: plain frozen records.

    Raises:
        NbguardError: nothing has been recorded, or this is no IPython session.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        raise NbguardError("this is not an IPython session, so there are no cells to record")
    return session_of(shell).recording.history


def notices() -> tuple[Notice, ...]:
    """Return nbguard's notices in this kernel, a record for each cause, as plain frozen data.

    Raises:
        NbguardError: this is no IPython session.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        raise NbguardError("this is not an IPython session, so there are no cells to watch")
    return session_of(shell).notices.notices.notices
