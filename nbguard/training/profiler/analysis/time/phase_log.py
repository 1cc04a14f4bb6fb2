"""The log of a profile, with the end of each step of the fit. Each nanosecond of the recording belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

BoundaryKind = Literal["batch", "end", "loss", "step", "fit", "disturbed"]
"""`batch`: an iterator over a loader was asked for its next batch. `end`: it had none left. `loss`: there is a loss to train
on. `step`: an optimizer has stepped. `fit`: a Learner's fit began. `disturbed`: in this batch nbguard looked closer: its
times tell nothing of the fit."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """An event that divides the log into batches and fits."""

    at: int  # entries of the log before it
    kind: BoundaryKind  # of event
    loop: int  # number of the iterator, or for "fit" of the Learner's fit; 0 if none


class LogPosition(NamedTuple):
    """A place between two entries of a log."""

    marks: int  # before it
    boundaries: int  # before it


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

    def divided(self, places: Sequence[LogPosition]) -> tuple[PhaseLog, ...]:
        """Return the log in parts, divided at these places in their order; each part begins where the one before ends."""
        if not places:
            return (self,)
        bounds = (LogPosition(0, 0), *places, LogPosition(len(self.codes), len(self.boundaries)))
        return tuple(self._part(first, last) for first, last in pairwise(bounds))

    def _part(self, first: LogPosition, last: LogPosition) -> PhaseLog:
        inside = self.boundaries[first.boundaries : last.boundaries]
        return replace(
            self,
            start=self.times[first.marks - 1] if first.marks else self.start,
            codes=self.codes[first.marks : last.marks],
            times=self.times[first.marks : last.marks],
            boundaries=tuple(replace(boundary, at=boundary.at - first.marks) for boundary in inside),
        )


def joined(parts: Sequence[PhaseLog]) -> PhaseLog:
    """Return the parts of a log as one again."""
    if len(parts) == 1:
        return parts[0]
    codes = [code for part in parts for code in part.codes]
    times = [time for part in parts for time in part.times]
    before, boundaries = 0, []
    for part in parts:
        boundaries += [replace(boundary, at=boundary.at + before) for boundary in part.boundaries]
        before += len(part.codes)
    return replace(parts[-1], start=parts[0].start, codes=codes, times=times, boundaries=tuple(boundaries))
