"""The state of `%nbguard fix determinism` as a result, and as it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import median
from typing import ClassVar, Literal

from nbguard.memory.core.advice import make_deterministic, undo_deterministic
from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import before_start
from nbguard.units import format_time

Mode = Literal["off", "warn only", "on"]
"""Of torch.use_deterministic_algorithms."""

_SURE = 0.95
"""Probability that the interval of a slow-down holds the true one."""
_MARGIN = 0.1
"""Half of an interval, as a share of the step: a slow-down that is known less well is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step without and in deterministic mode, each run some times in turn. Times are of both passes."""

    plain: int  # nanoseconds, the median
    deterministic: int | None = None  # nanoseconds, the median; None if an operation has no deterministic implementation
    change: float | None = None  # deterministic / plain - 1, the median of the pairs; None if it is not known well enough
    margin: float | None = None  # half of the 95 % interval of `change`; None for too few pairs for one
    refused: tuple[str, ...] = ()  # operations without a deterministic implementation

    @classmethod
    def of(cls, plain: Sequence[int], deterministic: Sequence[int], refused: tuple[str, ...] = ()) -> StepTimes:
        """Return the times of a step that was run in pairs, one run of each kind in a pair."""
        middle = round(median(plain))
        if refused or not deterministic:
            return cls(plain=middle, refused=refused)
        ratios = sorted(slow / fast for fast, slow in zip(plain, deterministic, strict=True))
        rank, ratio = _rank(len(ratios)), median(ratios)
        margin = None if rank is None else (ratios[-1 - rank] - ratios[rank]) / 2
        change = ratio - 1 if margin is not None and margin <= _MARGIN * ratio else None
        return cls(plain=middle, deterministic=round(median(deterministic)), change=change, margin=margin)


def _rank(count: int) -> int | None:
    """Return the place in sorted values at which an interval of their median begins; None if they are too few for one."""
    place, outside = None, 0.0
    for below in range(count // 2):
        outside += 2 * comb(count, below) / 2**count
        if outside > 1 - _SURE:
            break
        place = below
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic(Result):
    """The settings that make a run repeat."""

    kind: ClassVar[str] = "deterministic"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.deterministic:deterministic_blocks"
    label: ClassVar[str] = "Deterministic computing"

    is_on: bool  # the settings are in force
    seed: int  # of all generators
    mode: Mode = "off"  # off after the undoing
    loaders: tuple[str, ...] = ()  # loaders with a generator of their own now
    generators: tuple[str, ...] = ()  # generators of the model's own that were seeded
    has_hash_seed: bool = False  # PYTHONHASHSEED was set when Python started
    times: StepTimes | None = None  # None if no Learner was given to measure it with

    def timed(self, times: StepTimes | None) -> Deterministic:
        """Return it with a measured slow-down."""
        return replace(self, times=times)


def deterministic_blocks(state: Deterministic) -> Iterator[Block]:
    """Yield the settings, the slow-down, and how to undo it."""
    if not state.is_on:
        yield Title("determinism: all settings are restored")
        return
    yield Title(f"the kernel computes deterministically from seed {state.seed} on", "strong")
    rows = [
        ("generators", f"Python's, numpy's and torch's are seeded{''.join(f'; {name}' for name in state.generators)}"),
        ("algorithms", f"torch.use_deterministic_algorithms: {state.mode}; cudnn.benchmark off"),
        ("loaders", ", ".join(state.loaders) or "none was given; " + make_deterministic("learn").code + " seeds them"),
        ("sets", "PYTHONHASHSEED is set" if state.has_hash_seed else "not fixed; set PYTHONHASHSEED=0 " + before_start()),
        ("slow-down", _slow_down(state.times)),
    ]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows))
    yield Line("to undo all of this: " + undo_deterministic().code, "dim")


def _slow_down(times: StepTimes | None) -> str:
    if times is None:
        return "not measured: " + make_deterministic("learn").code + " measures it"
    if times.refused:
        names = ", ".join(times.refused)
        return f"not measured: {names} has no deterministic implementation and will raise; --warn-only lets it pass"
    if times.change is None:
        return f"not measurable: the steps of {format_time(times.plain)} differ more from run to run than the modes do"
    return f"{slow_down(times)}: a step took {format_time(times.plain)}, now {format_time(times.deterministic or 0)}"


def slow_down(times: StepTimes) -> str:
    """Return a slow-down with its interval, as in +3 % ± 2; empty where none is known."""
    if times.change is None or times.margin is None:
        return ""
    return f"{round(100 * times.change):+d} % ± {max(1, round(100 * times.margin))}"
