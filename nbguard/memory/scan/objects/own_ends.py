"""Methods of a class that let go of the things its instances pile up.

A metric keeps its states until `reset()`; a model with adapters has `delete_adapter`.
"""

from __future__ import annotations

import types

from nbguard.memory.core.facts import OwnEnd
from nbguard.memory.scan.heap.kinds import Types, mro_of, namespace_of

_METRICS = (frozenset({"reset", "update", "compute"}), frozenset({"reset", "accumulate", "value"}))


def own_end(cls: type) -> OwnEnd:
    """Return the method of a class that lets go of its instance's collected things, or an empty string."""
    names = {name for base in mro_of(cls) for name, value in namespace_of(base).items() if type(value) in _CALLED}
    if any(methods <= names for methods in _METRICS):
        return "reset"
    return "delete_adapter" if "delete_adapter" in names else ""


_CALLED = Types((types.FunctionType, property))
