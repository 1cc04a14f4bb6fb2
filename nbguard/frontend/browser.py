"""Answers of the page that reads snapshots in a browser, as the command line's own texts and their HTML.

The page runs this module in a Web Worker, by a Python that is compiled for browsers. A file stays on the reader's machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.snapshots.diagnosis import diagnosis_of, refusals_of, refused, saved_blocks
from nbguard.memory.snapshots.load import load_named
from nbguard.memory.snapshots.moment import At, RecordedHistory, moment_diff
from nbguard.memory.snapshots.report import report_of
from nbguard.render.html import Block, Line, blocks_html
from nbguard.render.text import blocks_text
from nbguard.texts import printable

Progress = Callable[[str, int, int], None]
"""Called with the stage, such as "read", and how much of it is done of how much."""

Answer = dict[str, Any]

_BEYOND = "this file needs more than a browser's tab can give it; in a terminal, nbguard diagnose FILE reads it"


class Page:
    """The files that the page has opened, and the answers on them.

    Args:
        progress: is told how far an answer is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._files: dict[str, tuple[Snapshot, RecordedHistory]] = {}

    def answer(self, question: str) -> str:
        """Return the answer to a question, both as JSON. An answer that cannot be given has an `error`, a sentence.

        With `beyond` this Python has not enough memory for it, perhaps for the files that are open already.
        """
        asked = json.loads(question)
        try:
            found = getattr(self, f"_{asked.pop('ask')}")(**asked)
        except NbguardError as error:
            found = {"error": printable(str(error))}
        except (MemoryError, RecursionError):
            found = {"error": _BEYOND, "beyond": True}
        return json.dumps(found)

    def _open(self, path: str) -> Answer:
        """Read a file; answer at once with the failed request and the holders of the memory."""
        self._files.pop(path, None)
        snapshot, names = load_named(path, partial(self._progress, "read"))
        self._files[path] = snapshot, RecordedHistory(path, snapshot, names)
        sentences = [Line(refused(refusal), "strong") for refusal in refusals_of(snapshot)]
        return _shown((*sentences, *saved_blocks(report_of(path, snapshot, names))), "holders")

    def _diagnose(self, path: str) -> Answer:
        """Answer as `nbguard diagnose FILE`."""
        snapshot, history = self._files[path]
        progress = partial(self._progress, "runs")
        return _shown(diagnosis_of(path, snapshot, history.names, trial_progress=progress).blocks(), "diagnosis")

    def _history(self, path: str) -> Answer:
        """Answer with the devices that have a history, each with its events, its peak and its first refusal."""
        history = self._files[path][1]
        devices = [
            {"device": number, "events": states.events, "peak": states.peak, "oom": states.refused}
            for number, states in ((number, history.of(number)) for number in history.devices)
        ]
        return {"devices": devices}

    def _moment(self, path: str, at: At, device: int) -> Answer:
        """Answer as `nbguard map FILE --at EVENT --device N`."""
        return _shown(self._files[path][1].at(at, device).blocks(), "moment")

    def _diff(self, before: str, after: str, at: list[At | None], device: int | None = None) -> Answer:
        """Answer as `nbguard diff BEFORE AFTER --at EVENT --and EVENT`; no event stands for the end of the history."""
        first, second = (self._files[path][1] for path in (before, after))
        return _shown(moment_diff(first, second, (at[0], at[1]), device).blocks(), "difference")


def _shown(blocks: Iterable[Block], label: str) -> Answer:
    shown = tuple(blocks)
    return {"text": printable(blocks_text(shown), "\n\t"), "html": str(blocks_html(shown, label))}


def modules(package: Path) -> list[Path]:
    """Return the files of the package that these answers need, for the page to ship."""
    left_out = ("training", "frontend/notebook", "frontend/sidebar", "frontend/cluster", "frontend/gpu_leaks")
    return [
        file
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".css") and not file.relative_to(package).as_posix().startswith(left_out)
    ]
