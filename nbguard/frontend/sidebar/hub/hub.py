"""The hub of one kernel, which takes sidebars' messages and has them carried out where and when they may be."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError, OldHeapError
from nbguard.frontend.sidebar.hub.comms import Channel, Leases, PanelChannel
from nbguard.frontend.sidebar.hub.jobs import Job, Jobs
from nbguard.frontend.sidebar.hub.sampler import Sampler, ScanBudget
from nbguard.memory.cells.hooks import CellEnd, CellFact, cell_id_of, cells_on_stack

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.hub.outbox import Outbox
    from nbguard.frontend.sidebar.hub.plans import RequestHandler
    from nbguard.frontend.sidebar.hub.tick_source import TickSource
    from nbguard.frontend.sidebar.protocol import messages
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.facts import TickReading
    from nbguard.memory.core.oom_facts import OomFact
    from nbguard.memory.reports.notices.notice import Notice
    from nbguard.memory.scan.scan import Notebook
    from nbguard.memory.snapshots.moment import RecordedHistory


# --- Cells of the user that run now, and the kernel's status where ipykernel would call it idle meanwhile.


class Busy:
    """Knows of the cell that runs, from its beginning to its end.

    For every message that is handled while a cell runs, ipykernel publishes `busy` and then `idle`, and JupyterLab shows the
    kernel as idle from there on. `again` says `busy` once more, in the cell's name.
    """

    def __init__(self, shell: Any, kernel: Any) -> None:
        self._shell = shell
        self._kernel = kernel
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._ended: int | None = None
        self._parent: Any = None

    @property
    def cell(self) -> int | None:
        """Return the number of the cell that runs; None if none does."""
        return self._cell

    @property
    def ended(self) -> int | None:
        """Return the number of the last cell that has ended; None if none has."""
        if self._ended is not None or self._cell is not None:
            return self._ended
        return len(self._shell.history_manager.input_hist_parsed) - 1 or None

    @property
    def cell_id(self) -> str:
        """Return the id of the current cell in its notebook, or "" without one or if the frontend does not tell it."""
        return cell_id_of(self._parent)

    def begin(self, *, is_running: bool = False) -> None:
        """Note, in the thread of the cell, that one begins, or that one is running already."""
        parent = self._kernel.get_parent("shell")
        stored = len(self._shell.history_manager.input_hist_parsed)  # IPython counts a cell now before, now after it has run
        with self._lock:
            self._cell, self._parent = stored - is_running, parent

    def end(self) -> int | None:
        """Note that it ended, and return its number. From here on nothing says `busy`: the kernel has the last word."""
        with self._lock:
            ended, self._cell, self._parent = self._cell, None, None
            self._ended = ended
        return ended

    def again(self) -> None:
        """Say `busy` again after the message that is handled now, if a cell runs: once the kernel has said `idle`."""
        if self._cell is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._say()
        else:
            loop.call_soon(self._say)  # the kernel says `idle` before its loop comes to this

    def _say(self) -> None:
        with self._lock:
            if self._cell is not None:
                state = {"execution_state": "busy"}
                self._kernel.session.send(self._kernel.iopub_socket, "status", state, parent=self._parent, ident=b"status")


def is_in_cell(shell: Any) -> bool:
    """Say whether a cell is running whose end IPython will announce; a silent one, such as a startup file, is not."""
    parent = getattr(shell, "parent_header", None)
    if type(parent) is not dict or not parent:  # nothing has been asked of the kernel yet
        return False
    return cells_on_stack() > 0 and not parent.get("content", {}).get("silent", False)


# --- The hub.


_SETTLED = 0.3
"""Seconds after a cell's end before the heap is scanned: the next cell may be waiting already."""

_HISTORIES = 32
"""Requests for the line's history that wait for the next tick. Older ones are dropped: a view asks again."""

_GREETED = 200
"""Views that wait for the heap until the next tick. Each says hello again after a few seconds."""

_UNTIL_END = "a heap scan waits for the end of the cell"

_PREDICTION_JOB = "Next fit", "the running cell may use it, so its next fit is predicted when the cell ends", "predict"
_HISTORY_JOB = "History", "the allocator's history is read when the cell ends", "moment"
"""Title, reason to wait while a cell runs, and kind."""

_LOOK, _LOOK_MEANWHILE = "nbguard: look", "nbguard: look meanwhile"
"""Names of the jobs that scan the heap after a cell and while one runs, unlike any that a view may send. Of each one waits or
runs at a time."""

_log = logging.getLogger("nbguard")


def _survived() -> deque[str]:
    """Return the sentences on trainings that ran out of memory, which are kept where they are said."""
    changes = sys.modules.get("nbguard.training.survive.changes")
    told: deque[str] = deque() if changes is None else changes.RECENT
    return told


class Hub:
    """Answers sidebars, and ticks while a view is open; a listener of `cells.hooks.Hooks`, which tells it of cells.

    Messages are only noted in the thread that has them. Nothing runs, and nothing heavy is imported, before the
    first view says hello. `simulated` returns the counters of the simulated device, while cells run on one; `predict` the
    memory of the next fit of the Learner of a name; `notices` those on objects still in memory; `recall` tells an analysis the
    findings on its failure; `history` returns the allocator's recorded history.
    """

    name = "the sidebar"
    rank = 50

    def __init__(
        self,
        shell: Any,
        simulated: Callable[[], TickReading | None],
        predict: Callable[[str], str],
        notices: Callable[[Analysis], tuple[Notice, ...]],
        recall: Callable[[Analysis], None],
        history: Callable[[], RecordedHistory],
    ) -> None:
        self._shell = shell
        self._notices = notices
        self._recall = recall
        self._history = history
        self._predict = predict
        self._simulated = simulated
        self._kernel = shell.kernel
        self._thread = threading.get_ident()
        self._boot = uuid.uuid4().hex
        self._busy = Busy(shell, self._kernel)
        self._leases = Leases()
        self._jobs = Jobs(lambda: self._busy.cell is not None, lambda act: self._kernel.io_loop.add_callback(act))
        self._sampler = Sampler(self._tick, lambda: self._leases.interval)
        self._to_greet: deque[tuple[Channel, messages.Hello]] = deque(maxlen=_GREETED)
        self._history_requests: deque[tuple[Channel, messages.HistoryRequest]] = deque(maxlen=_HISTORIES)
        self._dismissed: deque[str] = deque(maxlen=_GREETED)
        self._made = threading.Lock()
        self._tick_source: TickSource | None = None
        self._handler: RequestHandler | None = None
        self._settling: Any = None
        self._is_in_a_row = False  # the cell that runs began before the last one's end was scanned
        self._budget = ScanBudget()
        self._begun = time.perf_counter()  # when the last cell began
        self._first_cell: CellEnd | None = None
        self._is_open = True
        if is_in_cell(shell):  # its beginning was not told, so neither will be its end
            self._busy.begin(is_running=True)
            self._first_cell = CellEnd(shell, lambda _: self._end_cell())
        self._panels = PanelChannel(self._kernel, self.receive)

    def close(self) -> None:
        """Take no more messages, forget who looks, see the threads end, and say that nothing more comes."""
        self._is_open = False
        channels = {
            id(channel): channel for channel in (self._panels, *self._leases.channels)
        }  # panels that do not look listen, too
        if self._first_cell is not None:
            self._first_cell.cancel()
        self._cancel_settling()
        self._leases.clear()
        self._jobs.clear()
        self._sampler.end()
        self._jobs.join()
        if self._tick_source is not None:
            self._tick_source.close()
        self._outbox.say_goodbye(channels.values())
        self._panels.close()

    @property
    def audience(self) -> tuple[int, float]:
        """Return how many views look, and how often a second they are told."""
        interval = self._leases.interval
        return self._leases.count, 0.0 if interval is None else 1 / (interval * self._sampler.slowness)

    @property
    def waiting(self) -> int:
        """Return the number of views' requests that are not done yet."""
        return len(self._jobs.listed)

    # --- cells ------------------------------------------------------------------------------------------------------------

    def before(self) -> None:
        """Note that a cell begins."""
        self._begun = time.perf_counter()
        self._busy.begin()
        _survived().clear()
        self._is_in_a_row = self._settling is not None
        self._cancel_settling()
        self._forget_offered()
        if self._tick_source is not None and self._busy.cell is not None:
            self._tick_source.begin_cell(self._busy.cell, self._busy.cell_id)
        self._jobs.proceed()

    def after(self, cell: CellFact) -> None:
        """Note that it ended; if its listeners scanned its leftovers, the sidebar needs no scan of its own."""
        if self._handler is not None:
            self._handler.states.offer(cell.scan.last)
            if cell.raised:
                self._handler.states.note_error()
        oom = None if cell.scan.last is None or not cell.raised else cell.scan.last.facts.oom
        self._end_cell(None if oom is None or oom.cell != cell.number else oom)

    def _end_cell(self, oom: OomFact | None = None) -> None:
        """Have the requests carried out that waited for the end of a cell, and have the heap scanned."""
        self._busy.end()
        if self._tick_source is not None:
            self._tick_source.end_cell(oom)
        is_idle = self._jobs.is_idle
        self._jobs.proceed()
        if self._handler is not None and self._leases.wants_scans:
            if self._is_in_a_row and is_idle and self._budget.allows(time.perf_counter() - self._begun):
                self._look_between_cells(self._handler)
            self._settling = self._kernel.io_loop.call_later(_SETTLED, self._settled)

    def _look_between_cells(self, handler: RequestHandler) -> None:
        """Scan the heap before the next cell of a Run All begins, as it would put off the scan after this one, too."""
        try:
            if handler.states.is_outdated:
                self._look_and_tell(is_waited_for=True)
            else:
                handler.states.confirm()
        except Exception:  # noqa: BLE001 - a look that fails must cost the user's cells nothing
            _log.debug("a heap scan between two cells failed", exc_info=True)

    def _settled(self) -> None:
        """Look at the heap if the cell has changed anything and none has begun since.

        A job that still runs began during the cell, and may have scanned before its end.
        """
        self._settling = None
        if self._handler is None or self._busy.cell is not None:
            return
        if self._jobs.is_working or self._handler.states.is_outdated:
            self._look()
        else:
            self._handler.states.confirm()

    def _forget_offered(self) -> None:
        """Have the next scan read the process, and the next question about the history read the allocator."""
        if self._handler is not None:
            self._handler.states.offer(None)
            self._handler.forget_history()

    def _cancel_settling(self) -> None:
        if self._settling is not None:
            self._kernel.io_loop.remove_timeout(self._settling)
            self._settling = None

    # --- views ------------------------------------------------------------------------------------------------------------

    def receive(self, message: Any, channel: Channel) -> None:
        """Take a view's message. Whatever it is, nothing is raised and nothing of it is run."""
        try:
            if self._is_open:
                self._take(message, channel)
        except Exception:  # noqa: BLE001 - what a browser sends must not cost the kernel anything
            _log.debug("a message of a sidebar was dropped", exc_info=True)
        finally:
            self._busy.again()

    def leave(self, channel: Channel) -> None:
        """Forget the views at the end of a way: a widget that is closed."""
        self._leases.end_channel(channel)

    def _take(self, message: Any, channel: Channel) -> None:
        from nbguard.frontend.sidebar.protocol import messages

        match messages.parse(message):
            case messages.Hello() as hello:
                self._leases.renew(hello.client, channel, visible=hello.visible, glance=hello.glance)
                if not hello.glance:
                    self._to_greet.append((channel, hello))
                self._sampler.wake()
            case messages.Bye(client):
                self._leases.end(client)
            case messages.BadRequest(rid, why):
                self._outbox.refuse(channel, rid, why)
            case messages.Cancel(rid):
                self._cancel(channel, rid)
            case messages.Dismiss(key):
                self._dismissed.append(key)
                self._sampler.wake()
            case messages.HistoryRequest() as request:
                self._history_requests.append((channel, request))
                self._sampler.wake()
            case messages.Refresh(rid):
                self._put(channel, rid, "Refresh", "", self._refresh, kind="refresh")
            case messages.PictureRequest(rid):
                self._put(channel, rid, "Look", _UNTIL_END, lambda: self._send_picture(channel, rid), kind="picture")
            case messages.LintRequest(rid, cells):
                self._put(channel, rid, "", "", lambda: self._lint(channel, rid, cells), kind="lint")
            case messages.Ask() | messages.PlanRequest() as asked:
                kind = f"plan {asked.action}" if isinstance(asked, messages.PlanRequest) else "why"
                self._put(channel, asked.rid, "Look", "", lambda: self._answer(channel, asked), kind=kind)
            case messages.PredictRequest() | messages.MomentRequest() as asked:
                is_moment = isinstance(asked, messages.MomentRequest)
                title, why, kind = _HISTORY_JOB if is_moment else _PREDICTION_JOB
                self._put(channel, asked.rid, title, why, lambda: self._answer(channel, asked), kind=kind)
            case messages.Apply(rid, token) as asked:
                title, why = ("Apply", "") if self._handler is None else self._handler.plans.about(token)
                self._put(channel, rid, title, why, lambda: self._answer(channel, asked))

    def _put(self, channel: Channel, rid: str, title: str, why: str, run: Callable[[], None], *, kind: str = "") -> None:
        """Have a request done, and its sender told how it goes; `why` it waits, if a cell runs.

        Of those of a `kind` by one channel that wait, the newest is done.
        """
        self._outbox.acknowledge(channel, rid)
        refuse, tell_queued = (partial(tell, channel, rid) for tell in (self._outbox.refuse, self._outbox.queue))
        of_channel = f"{kind} {id(channel)}" if kind else ""
        job = Job(run=run, failed=refuse, rid=rid, kind=of_channel, title=title, why=why, tell_queued=tell_queued)
        if not self._jobs.put(job):
            refuse("too many requests are queued; wait for the cell to end")

    def _answer(self, channel: Channel, asked: messages.Question) -> None:
        handler = self._ready()
        try:
            answer, has_changed = handler.answer(asked)
        except OldHeapError:
            self._outbox.send_state([channel], handler.states.last)
            raise
        self._outbox.answer(channel, answer)
        if has_changed:
            self._look_and_tell(always=True)

    def _send_picture(self, channel: Channel, rid: str) -> None:
        handler = self._ready()
        if self._simulated() is not None:
            raise NbguardError("a simulated device has only the picture from when the sidebar was opened")
        if handler.states.is_outdated or not handler.states.last.heap:
            self._look_and_tell()
        self._outbox.answer(channel, handler.picture(rid))

    def _lint(self, channel: Channel, rid: str, cells: tuple[str, ...]) -> None:
        from nbguard.frontend.sidebar.protocol.messages import Linted
        from nbguard.frontend.sidebar.protocol.state import CellFinding
        from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
        from nbguard.training.lint.lint import lint_cells

        findings = (
            CellFinding(found.cell - 1, found.line, found.code, truncate_utf8(found.message))
            for found in lint_cells(cells)
            if found.cell is not None
        )
        self._outbox.answer(channel, Linted(rid, tuple(findings)))

    def _cancel(self, channel: Channel, rid: str) -> None:
        """Drop what waits under `rid`. A running job goes on, and is answered when it is done."""
        self._outbox.acknowledge(channel, rid)
        dropped = self._jobs.cancel(rid)
        if dropped is not None:
            dropped.failed("cancelled before it began; nothing was touched")
        elif not self._jobs.has(rid):
            self._outbox.refuse(channel, rid, "there is nothing to cancel, because it is already done")

    # --- what is told -----------------------------------------------------------------------------------------------------

    @cached_property
    def _outbox(self) -> Outbox:
        """Return the sender of messages, imported here alone, once there is somebody to send one to."""
        from nbguard.frontend.sidebar.hub.outbox import Outbox

        return Outbox()

    def _notebook(self) -> Notebook:
        """Return where the names live, and whether a cell runs while this thread looks."""
        from nbguard.memory.scan.scan import Notebook

        return Notebook(shell=self._shell, namespace=self._shell.user_ns, is_running=threading.get_ident() != self._thread)

    def _ready(self) -> RequestHandler:
        """Return the worker; it is made when it is first needed, never in a thread of the kernel's channels."""
        with self._made:
            if self._handler is None:
                from nbguard.frontend.sidebar.hub.memory_states import MemoryStates
                from nbguard.frontend.sidebar.hub.plans import RequestHandler

                states = MemoryStates(
                    self._notebook,
                    self._boot,
                    lambda: (self._busy.ended, self._busy.cell),
                    self._notices,
                    self._recall,
                )
                self._handler = RequestHandler(self._notebook, states, self._predict, self._history)
            return self._handler

    def _tick(self) -> None:
        try:
            if self._tick_source is None:
                from nbguard.frontend.sidebar.hub.tick_source import TickSource

                self._tick_source = TickSource(self._boot, self._simulated)
            look = None if self._handler is None else self._handler.states.look_for_ticks
            tick = self._tick_source.tick(look, self._busy.cell, self._jobs.listed, tuple(_survived()))
            self._outbox.send_tick(self._leases.channels, tick)
            while self._history_requests:
                channel, request = self._history_requests.popleft()
                self._outbox.send_history(channel, request.rid, self._tick_source.history(request.seconds))
            if self._to_greet:
                self._greet(self._ready())
            if self._handler is not None:
                self._take_back(self._handler)
        except Exception:  # noqa: BLE001 - the next one may do
            _log.debug("a tick of the sidebar failed", exc_info=True)

    def _take_back(self, handler: RequestHandler) -> None:
        """Tell views the rows that are over since the last scan; between cells have the heap scanned again.

        Not while a job is done: a cleanup frees step by step, and scans at the end itself.
        """
        while self._dismissed:
            handler.states.dismiss(self._dismissed.popleft())
        if not self._jobs.is_working and handler.states.take_back():
            self._outbox.send_state(self._leases.channels, handler.states.last)
            if self._busy.cell is None and self._settling is None:
                self._look()

    def _greet(self, handler: RequestHandler) -> None:
        """Send the heap to who has said hello without it; look again if it is old, beside a cell only if there is none yet."""
        without = dict[int, Channel]()
        while self._to_greet:
            channel, hello = self._to_greet.popleft()
            if (hello.boot, hello.heap) != (self._boot, handler.states.last.heap):
                without[id(channel)] = channel
        if without:
            self._outbox.send_state(without.values(), handler.states.last)
        if handler.states.is_outdated and (self._busy.cell is None or not handler.states.last.heap):
            self._look(waits=bool(handler.states.last.heap))

    def _look(self, *, waits: bool = True) -> None:
        """Have the heap looked at, unless it is to be already; `waits`: not while a cell runs."""
        why = _UNTIL_END if waits else ""
        rid = _LOOK if waits else _LOOK_MEANWHILE
        self._jobs.put(
            Job(run=self._look_and_tell, failed=lambda reason: _log.debug("a heap scan: %s", reason), rid=rid, why=why)
        )

    def _look_and_tell(self, *, always: bool = False, is_waited_for: bool = False) -> None:
        states, start = self._ready().states, time.thread_time()
        has_changed = states.look()
        if self._tick_source is not None:
            self._tick_source.call(states.learners)
        if has_changed or always:
            self._outbox.send_state(self._leases.channels, states.last)
        note = self._budget.spend if is_waited_for else self._budget.measure
        note(time.thread_time() - start)

    def _refresh(self) -> None:
        self._forget_offered()
        self._look_and_tell(always=True)
