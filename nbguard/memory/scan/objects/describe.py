"""A description of an object in one line, from its type and plain attributes, never from its repr."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.autograd import has_own_dispatch
from nbguard.memory.scan.heap.kinds import Kinds, Types, name_of
from nbguard.memory.scan.heap.unread import Unread
from nbguard.memory.scan.objects.learners import learner_names
from nbguard.memory.scan.objects.loaders import worker_count
from nbguard.units import counted

_SIZED = Types((list, tuple, set, dict))


def describe(obj: Any, kinds: Kinds, unread: Unread) -> str:
    """Return a description of `obj`, e.g. `Learner · Sequential · Adam`, `list of 118`, or else its type."""
    return unread.read(obj, partial(_words, kinds=kinds), otherwise=name_of(type(obj)))


def _words(obj: Any, kinds: Kinds) -> str:
    cls = type(obj)
    kind = kinds.of(cls)
    if kind == "learner":
        return " · ".join(learner_names(obj))
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


def tensor_shape(tensor: Any) -> str:
    """Return a tensor's shape and dtype as text, e.g. `64×3×224×224 float32`, read from the C base class."""
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunctionSubclass():
        dtype = str(base.__dict__["dtype"].__get__(tensor)).removeprefix("torch.")
        if base.__dict__["is_nested"].__get__(tensor):
            return f"nested of {base.size(tensor, 0)} {dtype}"
        shape = base.__dict__["shape"].__get__(tensor)
    return f"{'×'.join(map(str, tuple(shape))) or 'scalar'} {dtype}"
