"""The parts of a profile: instruments that watch one thing each."""

from __future__ import annotations

from typing import Protocol, TypeVar

from nbguard.profiler.record.recorder import Recorder

Observed = TypeVar("Observed", covariant=True)


class Instrument(Protocol[Observed]):
    """Watches one thing during a fit. Its observations are a part of `FitObservations`: frozen, without live objects."""

    def start(self, recorder: Recorder) -> None:
        """Subscribe and patch, on the thread of the fit. An exception switches it off, not the fit."""

    def stop(self) -> None:
        """Take everything down again; called once, however the fit has ended, and before anything is shown."""

    def observe(self) -> Observed:
        """Return its observations; called after `stop`."""
