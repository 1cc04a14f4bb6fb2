"""The state of `%nbguard fix determinism` as a result, and as it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.advice import make_deterministic, undo_deterministic
from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.units import format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step as it is, and in deterministic mode. Nanoseconds of both passes, the least of some runs in turn."""

    plain: int
    deterministic: int | None = None  # None: an operation has no deterministic implementation
    refused: tuple[str, ...] = ()  # such operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic(Result):
    """The settings that make a run repeat."""

    kind: ClassVar[str] = "deterministic"
    view: ClassVar[str] = "nbguard.doctor.analysis.deterministic:deterministic_blocks"
    label: ClassVar[str] = "Deterministic computing"

    is_on: bool
    seed: int
    mode: str = "off"  # of torch.use_deterministic_algorithms: on, warn only, or off after the undoing
    loaders: tuple[str, ...] = ()  # loaders with a generator of their own now
    generators: tuple[str, ...] = ()  # generators of the model's own that were seeded
    has_hash_seed: bool = False  # PYTHONHASHSEED was set when Python started
    times: StepTimes | None = None  # None: no Learner was given to measure it with

    def timed(self, times: StepTimes | None) -> Deterministic:
        """Return it with a measured slow-down."""
        return replace(self, times=times)


def deterministic_blocks(state: Deterministic) -> Iterator[Block]:
    """Yield what is set, the slow-down, and how to undo it."""
    if not state.is_on:
        yield Title("determinism: all that was set for it is as it was before")
        return
    yield Title(f"the kernel computes deterministically from seed {state.seed} on", "strong")
    rows = [
        ("generators", f"Python's, numpy's and torch's are seeded{''.join(f'; {name}' for name in state.generators)}"),
        ("algorithms", f"torch.use_deterministic_algorithms: {state.mode}; cudnn.benchmark off"),
        ("loaders", ", ".join(state.loaders) or f"none was given: {make_deterministic('learn').code} seeds them"),
        ("sets", "PYTHONHASHSEED is set" if state.has_hash_seed else "not set: PYTHONHASHSEED=0 before Jupyter starts does it"),
        ("slow-down", _slow_down(state.times)),
    ]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows))
    yield Line(f"to put all of it back: {undo_deterministic().code}", "dim")


def _slow_down(times: StepTimes | None) -> str:
    if times is None:
        return f"not measured: {make_deterministic('learn').code} measures it"
    if times.deterministic is None:
        names = ", ".join(times.refused)
        return f"not measured: {names} has no deterministic implementation and will raise; --warn-only lets it pass"
    change = times.deterministic / times.plain - 1
    return f"a step took {format_time(times.plain)}, now {format_time(times.deterministic)} ({change:+.0%})"
