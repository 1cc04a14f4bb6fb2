"""Reports of work that takes long: words now and then to whoever waits in the same thread, and to nobody else."""

from __future__ import annotations

import io
import threading

import pytest

from nbguard.frontend.notebook.display import ProgressLine
from nbguard.memory.scan import progress


def test_a_stage_is_reported_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    with progress.reported(said.append):
        progress.stage("quick")
        now[0] = 1.5
        progress.stage("tracing")
        progress.report(12_000)  # just told
        now[0] = 3.0
        progress.report(12_000)

    assert said == ["nbguard is tracing…", "nbguard is scanning: 12,000 objects…"]


def test_who_waits_within_is_told_and_then_who_waited_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    outer, inner = list[str](), list[str]()

    with progress.reported(outer.append):
        with progress.reported(inner.append):
            progress.stage("one")
        progress.stage("two")
        thread = threading.Thread(target=progress.stage, args=("three",))
        thread.start()
        thread.join()
    progress.stage("four")

    assert (inner, outer) == (["nbguard is one…"], ["nbguard is two…"])


class _Stream(io.StringIO):
    """Standard error as a terminal, or as a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_is_left_neither_in_a_terminal_nor_in_a_file(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shell whose output was kept, `nbguard is scanning…` stood before the outcome."""
    stream = _Stream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    line = ProgressLine()
    line.say("nbguard is scanning…")
    line.end()

    assert stream.getvalue() == ("\rnbguard is scanning…\r" + " " * 20 + "\r" if is_terminal else "")
