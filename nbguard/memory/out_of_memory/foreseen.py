"""Predictions on a fit that ran out of memory: a batch that fits, and changes that save memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbguard.memory.core.advice import Advice, foresee_savings
from nbguard.memory.core.facts import EXPERIMENT_KINDS
from nbguard.memory.core.references.graph import STALE_KINDS

if TYPE_CHECKING:
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.out_of_memory.failed_request import FailedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseenChange:
    """A change to the fit that failed, predicted on the device after a cleanup."""

    name: str  # in words
    saved: int  # bytes fewer that are reserved at the peak
    fits: bool | None  # with it the fit runs; None if unknown
    cost: str  # cost of the change, in words
    code: str  # lines that make it, of the user's names

    @property
    def words(self) -> str:
        """Return its effect in a sentence without its first capital."""
        verdict = {True: "it fits (predicted)", False: "it does not fit either (predicted)", None: "it may fit"}[self.fits]
        return f"with {self.name}, {verdict}; {self.cost}"


def batch_that_fits(analysis: Analysis) -> int | None:  # noqa: ARG001 - a question
    """Return the batch size that lets the failed fit run after a cleanup, by prediction, or None if unknown.

    It takes a search, which the notebook makes: `Analysis.know` has its result.
    """
    return None


def changes_foreseen(analysis: Analysis) -> tuple[ForeseenChange, ...]:  # noqa: ARG001 - a question
    """Return the changes to the failed fit that were tried, those that fit first; the notebook knows them, as the batch."""
    return ()


def savings_of(request: FailedRequest) -> Advice | None:
    """Return the line that predicts the savings of memory in the failed fit, or None where it would say nothing.

    The fit is one of a Learner that a name leads to, and that trains.
    """
    graph, oom = request.facts.graph, request.oom
    if oom.kind not in ("device", "library") or not oom.learner or not oom.trains:
        return None
    for root in graph.roots:
        if root.kind not in STALE_KINDS and root.label.isidentifier():
            nodes = (graph.nodes[number] for number in root.nodes)
            if any(node.ref == oom.learner and node.kind in EXPERIMENT_KINDS for node in nodes):
                return foresee_savings(root.label)
    return None
