"""The log of a profile: when what went on has ended. Each nanosecond of the recording belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BoundaryKind = Literal["batch", "end", "loss", "step", "fit", "disturbed"]
"""`batch`: an iterator over a loader was asked for its next batch. `end`: it had none left. `loss`: there is a loss to train
on. `step`: an optimizer has stepped. `fit`: a Learner's fit has begun. `disturbed`: in this batch nbguard looked closer: its
times tell nothing of the fit."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Something that divides the log: it happened after the first `at` marks. `loop` numbers iterators, or Learners."""

    at: int
    kind: BoundaryKind
    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLog:
    """What went on between `times[i - 1]` (`start` for the first) and `times[i]` was `labels[codes[i]]`, a phase.

    Times are nanoseconds of `time.perf_counter_ns`.
    """

    start: int
    codes: Sequence[int]
    times: Sequence[int]
    labels: tuple[str, ...]
    boundaries: tuple[Boundary, ...] = ()

    @property
    def end(self) -> int:
        """Return when the last mark was set."""
        return self.times[-1] if self.times else self.start

    @property
    def wall(self) -> int:
        """Return the nanoseconds from the start to the last mark."""
        return self.end - self.start
