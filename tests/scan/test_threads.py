"""What a running thread has in hand is held by the thread, also in functions that only pass on a call."""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import Iterator

import pytest
import torch

import nbguard
from nbguard.memory.core.facts import Root
from nbguard.memory.scan.outside import referrers
from nbguard.memory.scan.scan import Notebook, scan

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_FEED = """
def feed(buffer, started, end):
    waiting = buffer.popleft()
    started.set()
    end.wait()
"""


class Call:
    """A call that waits for a worker."""

    def __init__(self) -> None:
        self.argument = torch.nn.Linear(1000, 1000)


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """The end of a thread that feeds a queue, and that has a call in hand."""
    space = {"__name__": "concurrent.queues"}
    exec(_FEED, space)
    feed: types.FunctionType = space["feed"]  # type: ignore[assignment]
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=feed, args=(deque([Call()]), started, end), name="feeder")
    thread.start()
    started.wait()
    yield end
    end.set()
    thread.join()


def _roots() -> list[Root]:
    return [root for root in scan(Notebook(shell=None, namespace={})).facts.graph.roots if root.kind == "library"]


def test_a_call_in_hand_is_the_threads(end: threading.Event) -> None:
    (root,) = _roots()
    assert (root.label, root.what, root.ended_by) == ("thread feeder", "runs", "")

    report = nbguard.report({})
    (finding,) = (finding for finding in report.findings if finding.kind in ("handle", "no_name"))
    assert "freed when the thread ends" in finding.sentence


def test_a_library_has_a_line_against_its_own_threads(end: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referrers, "emptied_by", lambda: {("concurrent.queues", "feed"): "import queues; queues.end()"})

    (root,) = _roots()

    assert root.ended_by == "import queues; queues.end()"
