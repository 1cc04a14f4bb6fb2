"""Hooks around the user's cells, with one pair of IPython callbacks, one scan and one reading of counters for all listeners.

A cell is code that the user ran and IPython numbered. Not counted: code run by a comm message (a widget's callback: IPython
fires only `pre_execute` and `post_execute` for it, or the request it belongs to is no `execute_request`), silent requests and
those that leave no history (inspectors, `user_expressions`), cells inside cells, and cells of other threads (subshells) than
the one that loaded nbguard.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nbguard.errors import line_of

if TYPE_CHECKING:
    from nbguard.memory.core.facts import Reading
    from nbguard.memory.scan.devices.counters import Counters
    from nbguard.memory.scan.scan import TimedScan


# --- The end of the cell that runs now, for actions that a magic in it began.


class CellEnd:
    """Calls `act(result)` once, with IPython's result, when the cell that runs now ends.

    It is called before the other listeners at the end of each cell, whose time, as for a scan of the heap, is not the cell's.
    Cells inside this one and cells of other threads (subshells) are not taken for it.
    """

    def __init__(
        self, shell: Any, act: Callable[[Any], None], failed: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """`failed(error)` is called where the cell failed, before IPython draws the traceback, which may take seconds."""
        self._shell = shell
        self._failed = failed
        self._show = shell.showtraceback
        if failed is not None:
            self._before = vars(shell).get("showtraceback")
            shell.showtraceback = self._shows
        self._events = shell.events
        self._act = act
        self._inside = 0
        self._thread = threading.get_ident()
        self._events.register("pre_run_cell", self._begins)
        self._events.register("post_run_cell", self._ended)
        callbacks = self._events.callbacks["post_run_cell"]
        callbacks.insert(0, callbacks.pop())

    def cancel(self) -> None:
        """Call nobody."""
        if self._failed is not None and vars(self._shell).get("showtraceback") == self._shows:
            if self._before is None:
                del self._shell.showtraceback
            else:
                self._shell.showtraceback = self._before
        for event, function in (("pre_run_cell", self._begins), ("post_run_cell", self._ended)):
            if function in self._events.callbacks[event]:
                self._events.unregister(event, function)

    def _shows(self, *args: Any, **named: Any) -> Any:
        """Show a traceback, after `failed` where it is the one of the cell's own code."""
        __tracebackhide__ = True
        is_cells = named.get("running_compiled_code") and not self._inside and threading.get_ident() == self._thread
        if is_cells and self._failed is not None:
            with suppress(Exception, KeyboardInterrupt):  # the user's traceback comes in any case
                self._failed(sys.exc_info()[1])
        return self._show(*args, **named)

    def _begins(self, _: Any) -> None:
        self._inside += threading.get_ident() == self._thread

    def _ended(self, result: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._inside:
            self._inside -= 1
            return
        self.cancel()
        act, self._act, self._failed = self._act, _nothing, None  # whoever waits for the end refers to this, and `act` to them
        act(result)


def _nothing(_: Any) -> None:
    pass


# --- The scan of the notebook after a cell, shared by all listeners that ask for it.


class CellScan:
    """Scans the notebook when the first listener asks for it, and hands the same scan to the others.

    It is for the listeners of one cell, between its end and the beginning of the next, and so is the analysis of the scan. A
    listener that changes the state itself hands in a scan made afterwards.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.last: TimedScan | None = None

    def get(self) -> TimedScan:
        """Return the scan of the state after the cell. Raises NoTorchError if PyTorch is not imported."""
        if self.last is None:
            from nbguard.memory.scan.scan import Notebook, timed_scan

            self.last = timed_scan(Notebook(shell=self._shell, namespace=self._shell.user_ns))
        return self.last

    def replace(self, after: TimedScan | None) -> None:
        """Forget the scan so far: a listener has changed the state. `after` was made since, if any was."""
        self.last = after


# --- The counters at the beginning and at the end of a cell, read once for all listeners that ask.


class CellCounters:
    """Reads the counters when the first listener asks for them, and hands the same reading to the others.

    malloc may need a millisecond for its answer, and a listener that looks at the heap changes it for those after it.
    """

    def __init__(self) -> None:
        self._counters: Counters | None = None  # made when the first listener asks
        self._reading: Reading | None = None
        self._is_read = False

    def forget(self) -> None:
        """Forget the reading: a cell begins or ends."""
        self._is_read = False

    def read(self) -> Reading | None:
        """Return the counters of this end of the cell; None where there are none (`Counters.read`)."""
        if not self._is_read:
            self._reading, self._is_read = self.read_now(), True
        return self._reading

    def read_now(self) -> Reading | None:
        """Return the counters as they are now, for who has changed them since by looking."""
        if self._counters is None:
            from nbguard.memory.scan.devices.counters import Counters

            self._counters = Counters()
        return self._counters.read()


@dataclass(frozen=True, slots=True)
class CellFact:
    """One of the user's cells that ended."""

    number: int  # as IPython counts: In[number]
    raised: bool  # an error was shown, its own or one that ended inside of it (`%%capture`, `%run`, the repr of a result)
    scan: CellScan = field(compare=False)  # of the state after it, for all listeners that need one


def cell_id_of(parent: Any) -> str:
    """Return the id in its notebook of the cell that a message asked to run; empty if the frontend does not tell it."""
    metadata = parent.get("metadata") if type(parent) is dict else None
    cell_id = metadata.get("cellId") if type(metadata) is dict else None
    return cell_id if type(cell_id) is str else ""


class Listener(Protocol):
    """A part of nbguard that acts before and after cells."""

    name: str  # as messages to the user call it
    rank: int  # its place among the others: the lowest is called first

    def before(self) -> None:
        """Act before a cell of the user's."""

    def after(self, cell: CellFact) -> None:
        """Act after a cell of the user's."""


_LONGEST_REST = 63
"""Cells that a listener sits out at most."""


@dataclass(slots=True)
class _Failures:
    """A listener that failed, and when it is tried again."""

    causes: set[str] = field(default_factory=set)  # that were reported
    in_a_row: int = 0  # cells at which it failed, with none between them at which it did not
    rest: int = 0  # cells that it sits out from now on


class Hooks:
    """Calls listeners before and after the user's cells. IPython knows of it only while there are any.

    A listener that fails is called again at the next cell, and more and more seldom if it goes on failing. Each cause is
    reported once, in one line; the user's cell never notices. An interrupt that falls into a listener counts as one of the
    cell: the cells queued behind it are not run.
    """

    def __init__(self, shell: Any, report: Callable[[str], None]) -> None:
        self._shell = shell
        self._report = report
        self._listeners: tuple[Listener, ...] = ()
        self._open: list[Any] = []
        self._informed: tuple[Listener, ...] = ()  # the listeners that the cell which runs is told to
        self._failures: dict[int, _Failures] = {}  # by the listener's id
        self._former_error = 0
        self.source: str = ""  # of the cell that runs, as the user typed it
        self.counters: CellCounters = CellCounters()  # for all listeners
        self._thread = threading.get_ident()

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Return the listeners in the order of their calls."""
        return self._listeners

    def add(self, listener: Listener) -> None:
        """Call `listener` from the next cell on."""
        if not self._listeners:
            self._shell.events.register("pre_run_cell", self._before_cell)
            self._shell.events.register("post_run_cell", self._after_cell)
        self._listeners = tuple(sorted((*self._listeners, listener), key=lambda added: added.rank))

    def remove(self, listener: Listener) -> None:
        """Take a listener off, if it is there."""
        if listener not in self._listeners:
            return
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        self._failures.pop(id(listener), None)
        if not self._listeners:
            self._shell.events.unregister("pre_run_cell", self._before_cell)
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._open.clear()

    def _before_cell(self, info: Any) -> None:
        if threading.get_ident() != self._thread or not _is_users(info, self._shell):
            return
        if self._open and cells_on_stack() < 2:
            self._open.clear()  # IPython never announced the end of an earlier cell
        self._open.append(info)
        if len(self._open) == 1:
            self._informed = tuple(listener for listener in self._listeners if not self._rests(listener))
            self.source = info.raw_cell if type(info.raw_cell) is str else ""
            self._former_error = _shown_error()
            self.counters.forget()
            self._call(lambda listener: listener.before(), "before a cell", has_ended=False)

    def _after_cell(self, result: Any) -> None:
        info = getattr(result, "info", None)
        if not any(opened is info for opened in self._open):
            return
        while self._open.pop() is not info:
            pass
        if self._open:  # it ran inside another cell
            return
        raised = result.error_before_exec is not None or result.error_in_exec is not None
        has_shown_one = raised or _shown_error() not in (0, self._former_error)
        cell = CellFact(result.execution_count, has_shown_one, CellScan(self._shell))
        self.counters.forget()
        if self._call(lambda listener: listener.after(cell), f"after In[{cell.number}]", has_ended=True) and not raised:
            result.error_in_exec = KeyboardInterrupt()

    def _call(self, act: Callable[[Listener], None], when: str, *, has_ended: bool) -> bool:
        """Call the listeners of this cell; return whether the user interrupted one. Their errors end here."""
        for listener in self._listeners:
            if listener not in self._informed:  # added by this cell: it was not called before it
                continue
            failed = ""
            try:
                act(listener)
                if has_ended and id(listener) in self._failures:
                    self._failures[id(listener)].in_a_row = 0
            except KeyboardInterrupt:
                return True
            except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user more than a line
                failed = f"{type(error).__name__} at {line_of(error)}"
            if failed:
                self._note_failure(listener, when, failed)
        return False

    def _note_failure(self, listener: Listener, when: str, cause: str) -> None:
        self._informed = tuple(other for other in self._informed if other is not listener)
        failures = self._failures.setdefault(id(listener), _Failures())
        failures.in_a_row += 1
        failures.rest = min(2 ** (failures.in_a_row - 1) - 1, _LONGEST_REST)
        if cause not in failures.causes:
            failures.causes.add(cause)
            with suppress(Exception):  # nowhere to show it
                self._report(f"nbguard: {listener.name} failed {when} ({cause}) and tries again later: please report it")

    def _rests(self, listener: Listener) -> bool:
        """Say whether a listener that failed sits out the cell that begins."""
        failures = self._failures.get(id(listener))
        if failures is None or not failures.rest:
            return False
        failures.rest -= 1
        return True


def _is_users(info: Any, shell: Any) -> bool:
    """Say whether an execution is a cell that the user ran."""
    if info.silent or not info.store_history:
        return False
    parent = getattr(shell, "parent_header", None)  # of ipykernel; a terminal has none
    kind = parent.get("header", {}).get("msg_type", "execute_request") if type(parent) is dict else "execute_request"
    return bool(kind == "execute_request")


def cells_on_stack() -> int:
    """Return how many cells this is called from: two from a cell inside a cell, as `%rerun` makes it."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code.co_name == "run_cell_async" and frame.f_globals.get("__name__") == "IPython.core.interactiveshell"
    return depth


def _shown_error() -> int:
    """Return the id of the error that was shown last, or 0. It lives until another one is shown, whose id thus differs."""
    error = sys.__dict__.get("last_value")
    return 0 if error is None else id(error)
