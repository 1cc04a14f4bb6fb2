"""Methods by which a class of its own lets go of what its instances pile up, told by the methods that it has.

A metric (torchmetrics, torcheval, ignite, fastai) keeps its states until `reset()`; a model with adapters has `delete_adapter`.
"""

from __future__ import annotations

import types

from nbguard.memory.core.facts import OwnEnd
from nbguard.memory.scan.heap.kinds import Types, mro_of, namespace_of

_METRICS = (frozenset({"reset", "update", "compute"}), frozenset({"reset", "accumulate", "value"}))


def own_end(cls: type) -> OwnEnd:
    """Return the method of a class that lets go of what an instance has piled up; an empty string where it has none."""
    names = {name for base in mro_of(cls) for name, value in namespace_of(base).items() if type(value) in _CALLED}
    if any(methods <= names for methods in _METRICS):
        return "reset"
    return "delete_adapter" if "delete_adapter" in names else ""


_CALLED = Types((types.FunctionType, property))
