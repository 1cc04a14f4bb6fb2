"""A cleanup of the engines of a cluster: the plan of each, and its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.frontend.cluster.analysis.engines import Answer
from nbguard.render.blocks import Block, Line, Table, TableRow
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCleanup:
    """The cleanup of one engine. Sizes are bytes."""

    engine: int  # number in the cluster
    answer: Answer
    promised: int = 0  # by its plan
    freed: int | None = None  # measured; None if nothing has been done, or it has not said
    left: int | None = None  # that its tensors' storages hold afterwards; None likewise
    steps: tuple[str, ...] = ()  # of the plan or, once it has been carried out, those that were taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesCleanup(Result):
    """The plans of all engines of a cluster, or their outcomes."""

    kind: ClassVar[str] = "engines_cleanup"
    view: ClassVar[str] = "nbguard.frontend.cluster.analysis.cleanup:cleanup_blocks"

    engines: tuple[EngineCleanup, ...]  # in the order of their numbers
    is_done: bool  # False: a plan, nothing was touched

    @property
    def promised(self) -> int:
        """Return the bytes that all plans promise."""
        return sum(engine.promised for engine in self.engines)

    @property
    def freed(self) -> int:
        """Return the bytes that came back, of all engines that have said."""
        return sum(engine.freed or 0 for engine in self.engines)


def cleanup_blocks(cleanup: EnginesCleanup) -> Iterator[Block]:
    """Yield a row for each engine, and the sum."""
    names = ("engine", "promised", "freed", "left", "steps") if cleanup.is_done else ("engine", "would free", "steps")
    yield Table(
        rows=tuple(_row(engine, is_done=cleanup.is_done) for engine in cleanup.engines),
        names=names,
        figures=range(len(names) - 1),
    )
    silent = [engine for engine in cleanup.engines if engine.answer.kind != "answered"]
    without = f" · {counted(len(silent), 'engine')} left alone" if silent else ""
    if cleanup.is_done:
        yield Line(f"freed {format_bytes(cleanup.freed)} of {format_bytes(cleanup.promised)} promised{without}", "strong")
    else:
        yield Line(f"would free {format_bytes(cleanup.promised)} · nothing was touched{without}")


def _row(engine: EngineCleanup, *, is_done: bool) -> TableRow:
    words = engine.answer.reason or "; ".join(engine.steps) or "nothing is stale"
    has_plan = engine.answer.kind == "answered" or engine.promised
    figures = [engine.promised if has_plan else None, *((engine.freed, engine.left) if is_done else ())]
    return TableRow(cells=(str(engine.engine), *("" if each is None else format_bytes(each) for each in figures), words))
