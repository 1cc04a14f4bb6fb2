"""Learners and Trainers, with their parts, and the leftovers of an interrupted fit on them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from nbguard.libraries import DEFAULT_EXPERIMENT, ExperimentClass, experiments
from nbguard.memory.core.facts import LearnerFact
from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import Types, loaded_class, mro_of, name_of
from nbguard.memory.scan.objects.loaders import worker_count
from nbguard.memory.scan.roots.frames import running_fit_owners
from nbguard.units import counted

_NAMED = Types((types.FunctionType, type))


def experiment_of(cls: type) -> ExperimentClass:
    """Return the description of a class of Learners or Trainers, by the libraries that are loaded."""
    for base in mro_of(cls):
        for experiment in experiments():
            if any(loaded_class(module, experiment.name) is base for module in experiment.modules):
                return experiment
    return DEFAULT_EXPERIMENT


def is_learner(obj: Any) -> bool:
    """Say whether an object is a Learner, by its type."""
    return experiment_of(type(obj)).is_learner


def cancel_of_learners() -> Callable[[str], Exception]:
    """Return the exception that ends a Learner's fit without an error; one of its library is loaded."""
    cancels = (loaded_class(*experiment.cancel) for experiment in experiments() if experiment.is_learner)
    return cast("Callable[[str], Exception]", next(cls for cls in cancels if cls is not None))


def learner_names(learner: Any) -> tuple[str, ...]:
    """Return the names of a Learner's type and parts, from its plain attributes: Learner, Sequential, Adam, 8 workers."""
    attributes = attributes_of(learner) or {}
    names = [name_of(type(learner))]
    for part in experiment_of(type(learner)).parts:
        value, maker = attributes.get(part.attribute), attributes.get(part.maker)
        if part.kind == "loader":
            workers = worker_count(value)
            names += [counted(workers, "worker")] if workers else []
        elif made := getattr(maker, "__name__", "") if type(maker) in _NAMED else "":
            names.append(made)
        elif value is not None:
            names.append(name_of(type(value)))
    return tuple(names)


def learner_facts(objects: list[tuple[int, Any]]) -> tuple[LearnerFact, ...]:
    """Return a fact for each (node, Learner)."""
    running = running_fit_owners() if objects else set()
    return tuple(
        LearnerFact(node, id(learner) in running, learner_names(learner), _leftovers(learner)) for node, learner in objects
    )


def gradient_calls(objects: list[tuple[int, Any]]) -> tuple[tuple[int, str], ...]:
    """Return for each (node, Learner) the call of its own that frees its gradients."""
    return tuple((node, experiment_of(type(learner)).zero_gradients) for node, learner in objects)


def _leftovers(learner: Any) -> tuple[str, ...]:
    """Return the attributes that a fit left, of the Learner and of its callbacks; none where it has no loaders any more."""
    experiment, attributes = experiment_of(type(learner)), attributes_of(learner) or {}
    if any(part.kind == "loader" and part.attribute not in attributes for part in experiment.parts):
        return ()
    idle = experiment.leftovers
    left = [name for name in idle if name in attributes and not _is_idle(attributes[name], idle[name])]
    for path in experiment.callback_leftovers:
        callback, _, name = path.partition(".")
        if (attributes_of(attributes.get(callback)) or {}).get(name) is not None:
            left.append(path)
    return tuple(left)


def _is_idle(value: Any, idle: object) -> bool:
    return value is None or (type(value) is tuple and len(value) == 1 and value[0] is None and idle is not None)
