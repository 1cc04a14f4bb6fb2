"""A batch that fits, foreseen for the Learner whose fit ran out of memory."""

from __future__ import annotations

from typing import Any

from nbguard.cleanup.plan.default import default_plan
from nbguard.memory.analysis import Analysis


def foreseen_batch(analysis: Analysis, namespace: dict[str, Any], seconds: float) -> int | None:
    """Return the items of a batch that fits after a cleanup; None where it cannot be foreseen.

    Args:
        analysis: of the facts after the failure.
        namespace: the user's names: the Learner must be one of them.
        seconds: that the search may take.
    """
    oom = analysis.facts.oom
    if oom is None or oom.kind != "device" or not oom.learner or not oom.batch_size or analysis.facts.tracked != "cuda":
        return None
    learn = next((value for value in tuple(namespace.values()) if id(value) == oom.learner), None)
    if learn is None:
        return None
    from nbguard.prediction.fitting_batch import fitting_batch

    storages = analysis.facts.graph.storages
    freed = frozenset(storages[number].address for number in analysis.once(default_plan).storages)
    try:
        return fitting_batch(learn, oom.batch_size, freed, seconds)
    except Exception:  # noqa: BLE001 - a mistake of ours must not cost the user the card
        return None
