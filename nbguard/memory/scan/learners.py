"""Learners, Trainers and DataLoaders, with their parts and leftovers of an interrupted fit, and objects in one line."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from nbguard.libraries import DEFAULT_EXPERIMENT, Detail, ExperimentClass, details, experiments
from nbguard.memory.core.facts import LearnerFact
from nbguard.memory.scan.heap.autograd import has_own_dispatch
from nbguard.memory.scan.heap.kinds import Kinds, Types, attribute_of, attributes_of, loaded_class, mro_of, name_of
from nbguard.memory.scan.heap.walk import Unread
from nbguard.memory.scan.roots.frames import running_fit_owners
from nbguard.units import counted

# --- DataLoaders and the worker processes behind their iterators.


def worker_count(obj: Any) -> int:
    """Return how many worker processes a loader is set up with, or an iterator has; 0 if none or unknown.

    A Learner's own loader reports 1 always; the truth is in the torch loader behind it (`fake_l`).
    """
    if type(loaders := attribute_of(obj, "loaders")) is list and loaders:
        return worker_count(loaders[0])
    if (behind := attribute_of(obj, "fake_l")) is not None:
        return worker_count(behind)
    if type(workers := attribute_of(obj, "_workers")) is list:
        return len(workers)
    count = attribute_of(obj, "num_workers")
    return count if type(count) is int else 0


_NAMED = Types((types.FunctionType, type))
_FUNCTIONS = Types((types.FunctionType, types.MethodType, types.BuiltinFunctionType))


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
    return tuple((node, _gradient_call(learner)) for node, learner in objects)


def _gradient_call(learner: Any) -> str:
    experiment = experiment_of(type(learner))
    models = (part.attribute for part in experiment.parts if part.kind == "model")
    own = (name for name in models if attribute_of(learner, name) is not None)
    return experiment.zero_gradients or f"{next(own, 'model')}.zero_grad()"


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


# --- A description of an object in one line, from its type and plain attributes, never from its repr.


_SIZED = Types((list, tuple, set, dict))
_NAMED_KEYS = 3
"""Keys that a description names."""


def describe(obj: Any, kinds: Kinds, unread: Unread) -> str:
    """Return a description of `obj`, e.g. `Learner · Sequential · Adam`, `list of 118`, or else its type."""
    return unread.read(obj, partial(_words, kinds=kinds), otherwise=name_of(type(obj)))


def _words(obj: Any, kinds: Kinds) -> str:
    cls = type(obj)
    kind = kinds.of(cls)
    if kind == "learner":
        return " · ".join(learner_names(obj))
    if words := _detail_words(obj, kinds):
        return f"{name_of(cls)} · {words}"
    if kind in ("loader", "iterator"):
        workers = worker_count(obj)
        return name_of(cls) + (f" · {counted(workers, 'worker')}" if workers else "")
    if kind == "tensor":
        return f"{name_of(cls)} {tensor_shape(obj)}" if not has_own_dispatch(cls) else name_of(cls)
    if cls in _SIZED:
        return f"{name_of(cls)} of {cls.__len__(obj)}"
    if cls is types.MethodType:
        return f"bound method of {name_of(type(obj.__self__))}"
    if cls is partial:
        inner = obj.func
        return f"partial of {_words(inner, kinds) if type(inner) is types.MethodType else name_of(type(inner))}"
    if kind == "traceback":
        return f"{name_of(cls)} · its frames hold variables"
    if kind == "code":
        return "function"
    attributes = attributes_of(obj) if kind == "object" else None
    if attributes is not None and kinds.of(type(attributes.get("learn"))) == "learner":
        return f"{name_of(cls)} · holds its Learner"
    return name_of(cls)


def _detail_words(obj: Any, kinds: Kinds) -> str:
    """Return the parts that a library has its object's description name, without those that it lacks; empty without any."""
    bases = mro_of(type(obj))
    own = (known for (module, name), known in details().items() if (base := loaded_class(module, name)) and base in bases)
    return " · ".join(filter(None, (_detail(obj, each, kinds) for each in next(own, ()))))


def _detail(obj: Any, detail: Detail, kinds: Kinds) -> str:
    """Return one part in words: its class, the number of its elements, or the size of a dimension of a tensor."""
    for step in detail.path:
        obj = _step(obj, step)
    if obj is None:
        return ""
    if detail.dimension is not None:
        is_plain = kinds.of(type(obj)) == "tensor" and not has_own_dispatch(type(obj))
        sizes = _sizes(obj) if is_plain else ()
        return counted(sizes[detail.dimension], detail.unit) if len(sizes) >= -detail.dimension else ""
    if not detail.unit:
        return name_of(type(obj)) if type(obj) not in _FUNCTIONS else ""
    if type(obj) not in _SIZED:
        return ""
    names = [key for key in obj if type(key) is str] if detail.has_names else []
    more = f" and {len(names) - _NAMED_KEYS} more" if len(names) > _NAMED_KEYS else ""
    return counted(len(obj), detail.unit) + (f" ({', '.join(names[:_NAMED_KEYS])}{more})" if names else "")


def _step(obj: Any, step: str | int) -> Any:
    """Return an element, an entry, an attribute or a module of an object, or None where it has none such."""
    if type(obj) is dict:
        return next((value for key, value in obj.items() if type(key) is type(step) and key == step), None)
    if isinstance(step, int):
        return obj[step] if type(obj) is list and step < len(obj) else None
    part = attribute_of(obj, step)
    return (attribute_of(obj, "_modules") or {}).get(step) if part is None else part


def _sizes(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, read from the C base class; empty for a nested one."""
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunctionSubclass():
        return () if base.__dict__["is_nested"].__get__(tensor) else tuple(base.__dict__["shape"].__get__(tensor))


def tensor_shape(tensor: Any) -> str:
    """Return a tensor's shape and dtype as text, e.g. `64×3×224×224 float32`, read from the C base class."""
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunctionSubclass():
        dtype = str(base.__dict__["dtype"].__get__(tensor)).removeprefix("torch.")
        if base.__dict__["is_nested"].__get__(tensor):
            offsets = attribute_of(tensor, "_offsets")  # a jagged one would note in itself that it was asked for its size
            count = base.size(tensor, 0) if offsets is None else base.size(offsets, 0) - 1
            return f"nested of {count} {dtype}"
    return f"{'×'.join(map(str, _sizes(tensor))) or 'scalar'} {dtype}"
