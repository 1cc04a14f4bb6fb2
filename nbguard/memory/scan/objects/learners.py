"""fastai Learners: their parts, and the leftovers of an interrupted fit on them."""

from __future__ import annotations

import types
from typing import Any

from nbguard.memory.core.facts import LearnerFact
from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import Types, name_of
from nbguard.memory.scan.objects.loaders import worker_count
from nbguard.memory.scan.roots.frames import running_fit_owners
from nbguard.units import counted

LEFTOVERS = {"dl": None, "xb": (None,), "yb": (None,), "pred": None, "loss": None, "loss_grad": None}
"""Attributes of a Learner during a batch, with the values that fastai itself gives them at the end of a fit. An exception
skips that end, `get_preds` and `validate` never reach it, and `loss_grad` (the loss with its graph) is never reset."""
BARS = ("pbar", "mbar")
"""Bars that `learn.progress` makes at the start of a fit and keeps until the next: they hold the DataLoader they count."""
_NAMED = Types((types.FunctionType, type))


def learner_names(learner: Any) -> tuple[str, ...]:
    """Return the names of a Learner's type and parts, from its plain attributes: Learner, Sequential, Adam, 8 workers."""
    attributes = attributes_of(learner) or {}
    parts = [name_of(type(learner))]
    if (model := attributes.get("model")) is not None:
        parts.append(name_of(type(model)))
    opt, opt_func = attributes.get("opt"), attributes.get("opt_func")
    name = getattr(opt_func, "__name__", "") if type(opt_func) in _NAMED else ""
    if opt is not None or name:
        parts.append(name or name_of(type(opt)))
    if workers := worker_count(attributes.get("dls")):
        parts.append(counted(workers, "worker"))
    return tuple(parts)


def learner_facts(objects: list[tuple[int, Any]]) -> tuple[LearnerFact, ...]:
    """Return a fact for each (node, Learner)."""
    running = running_fit_owners() if objects else set()
    facts = []
    for node, learner in objects:
        attributes = attributes_of(learner) or {}
        left = tuple(name for name, idle in LEFTOVERS.items() if name in attributes and not _is_idle(attributes[name], idle))
        bars = attributes_of(attributes.get("progress")) or {}
        left += tuple(f"progress.{name}" for name in BARS if bars.get(name) is not None)
        facts.append(LearnerFact(node, id(learner) in running, learner_names(learner), left if "dls" in attributes else ()))
    return tuple(facts)


def _is_idle(value: Any, idle: object) -> bool:
    return value is None or (type(value) is tuple and len(value) == 1 and value[0] is None and idle is not None)
