"""What a profile is made of: parts that watch one thing each."""

from __future__ import annotations

from typing import Protocol

from nbguard.profiler.record.recorder import Recorder


class Instrument(Protocol):
    """Watches one thing during a fit. Its report is asked for after `stop`, by a method of its own."""

    def start(self, recorder: Recorder) -> None:
        """Put up what it needs, on the thread of the fit. What it raises switches it off, not the fit."""

    def stop(self) -> None:
        """Take everything down again; called once, however the fit has ended, and before anything is shown."""
