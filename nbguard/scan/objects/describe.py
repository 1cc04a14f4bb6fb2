"""One line on what an object is, from its type and plain attributes, never from its repr."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from nbguard.scan.heap.attributes import attributes_of
from nbguard.scan.heap.kinds import Kinds, name_of
from nbguard.scan.objects.learners import learner_names
from nbguard.scan.objects.loaders import worker_count
from nbguard.units import counted


def describe(obj: Any, kinds: Kinds) -> str:
    """Return what `obj` is, e.g. `Learner · Sequential · Adam`, `list of 118`, `bound method of Learner`."""
    cls = type(obj)
    kind = kinds.of(cls)
    if kind == "learner":
        return " · ".join(learner_names(obj))
    if kind in ("loader", "iterator"):
        workers = worker_count(obj)
        return name_of(cls) + (f" · {counted(workers, 'worker')}" if workers else "")
    if kind == "tensor":
        return f"{name_of(cls)} {tensor_shape(obj)}"
    if cls in (list, tuple, set, dict):
        return f"{name_of(cls)} of {cls.__len__(obj)}"
    if cls is types.MethodType:
        return f"bound method of {name_of(type(obj.__self__))}"
    if cls is functools.partial:
        inner = obj.func
        return f"partial of {describe(inner, kinds) if type(inner) is types.MethodType else name_of(type(inner))}"
    if kind == "traceback":
        return f"{name_of(cls)} · its frames hold variables"
    if kind == "code":
        return "function"
    attributes = attributes_of(obj) if kind == "object" else None
    if attributes is not None and kinds.of(type(attributes.get("learn"))) == "learner":
        return f"{name_of(cls)} · holds its Learner"
    return name_of(cls)


def tensor_shape(tensor: Any) -> str:
    """Return a tensor's shape and dtype as text, e.g. `64×3×224×224 float32`, read from the C base class."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():
        shape = torch._C.TensorBase.__dict__["shape"].__get__(tensor)
        dtype = torch._C.TensorBase.__dict__["dtype"].__get__(tensor)
    return f"{'×'.join(map(str, tuple(shape))) or 'scalar'} {str(dtype).removeprefix('torch.')}"
