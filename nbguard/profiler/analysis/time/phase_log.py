"""The log of a profile: when what went on has ended. Each nanosecond of the recording belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

BoundaryKind = Literal["batch", "end", "loss", "step", "fit", "disturbed"]
"""`batch`: an iterator over a loader was asked for its next batch. `end`: it had none left. `loss`: there is a loss to train
on. `step`: an optimizer has stepped. `fit`: a Learner's fit has begun. `disturbed`: in this batch nbguard looked closer: its
times tell nothing of the fit."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """An event that divides the log into batches and fits."""

    at: int  # entries of the log before it
    kind: BoundaryKind  # of event
    loop: int  # number of the iterator, or for "fit" of the Learner's fit; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLog:
    """The phases of a recording, end to end: `labels[codes[i]]` lasted from `times[i - 1]` (`start` at first) to `times[i]`."""

    start: int  # nanoseconds of time.perf_counter_ns
    codes: Sequence[int]  # numbers of phases
    times: Sequence[int]  # ends of these phases, nanoseconds of time.perf_counter_ns
    labels: tuple[str, ...]  # names of the phases, by number
    boundaries: tuple[Boundary, ...] = ()  # in their order
    callbacks: Mapping[str, str] = field(default_factory=dict)  # class of the callback by its phase; other phases are missing

    @property
    def end(self) -> int:
        """Return when the last mark was set."""
        return self.times[-1] if self.times else self.start

    @property
    def wall(self) -> int:
        """Return the nanoseconds from the start to the last mark."""
        return self.end - self.start
