"""A batch that fits, foreseen for the Learner whose fit ran out of memory, and remembered for every card on that failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbguard.memory.cleanup.plan.default import default_plan
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.out_of_memory.card import batch_that_fits


@dataclass(frozen=True, kw_only=True)
class _Foreseen:
    """The result of one search for a batch that fits."""

    failure: tuple[object, ...]  # of which failed fit
    items: int | None  # of the batch, or None if none was found
    kept: int  # bytes that a cleanup left when it was foreseen: with more than that it may not fit


class ForeseenBatch:
    """Foresees a batch that fits, and tells the analyses of later scans, while that failure is still the last error."""

    def __init__(self) -> None:
        self._last: _Foreseen | None = None

    def foresee(self, analysis: Analysis, namespace: dict[str, Any], seconds: float) -> None:
        """Tell the analysis the items of a batch that fits after a cleanup, where that can be foreseen.

        It is searched for once for each failure and state of the memory: every card on it says the same.

        Args:
            analysis: of the facts after the failure.
            namespace: the user's names: the Learner must be one of them.
            seconds: that the search may take.
        """
        oom, last = analysis.facts.oom, self._last
        if oom is None:
            return
        failure, kept = _failure(oom), _kept(analysis)
        if last is None or (last.failure, last.kept) != (failure, kept):
            self._last = _Foreseen(failure=failure, items=_search(analysis, oom, namespace, seconds), kept=kept)
        self.recall(analysis)

    def recall(self, analysis: Analysis) -> None:
        """Tell the analysis what was foreseen of its failure, unless more is held by now."""
        oom, last = analysis.facts.oom, self._last
        if oom is None or last is None or last.items is None:
            return
        if last.failure == _failure(oom) and _kept(analysis) <= last.kept:
            analysis.know(batch_that_fits, last.items)


def _search(analysis: Analysis, oom: OomFact, namespace: dict[str, Any], seconds: float) -> int | None:
    if oom.kind != "device" or not oom.learner or not oom.batch_size or analysis.facts.tracked != "cuda":
        return None
    learn = next((value for value in tuple(namespace.values()) if id(value) == oom.learner), None)
    if learn is None:
        return None
    from nbguard.training.prediction.fitting_batch import fitting_batch

    storages = analysis.facts.graph.storages
    freed = frozenset(storages[number].address for number in analysis.once(default_plan).storages)
    try:
        return fitting_batch(learn, oom.batch_size, freed, seconds)
    except Exception:  # noqa: BLE001 - a mistake of ours must not cost the user the card
        return None


def _failure(oom: OomFact) -> tuple[object, ...]:
    return oom.cell, oom.learner, oom.batch_size, oom.requested, oom.line


def _kept(analysis: Analysis) -> int:
    """Return the bytes that the default cleanup leaves."""
    whole = sum(storage.nbytes for storage in analysis.facts.graph.storages)
    return whole - analysis.once(default_plan).promised
