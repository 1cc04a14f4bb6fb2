"""Taking one reference away, where no `del` of Python's could be written (an entry, an attribute, a context's value)."""

from __future__ import annotations

import contextvars
import gc
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from nbguard.memory.core.references.graph import CONTEXT, GRADIENT
from nbguard.memory.scan.heap.attributes import TRANSPARENT, attributes_of
from nbguard.memory.scan.heap.kinds import Types, mro_of, name_of, namespace_of
from nbguard.memory.scan.heap.labels import HAMT

_SEQUENCES = Types((list, deque))


def objects_by_id(wanted: set[int]) -> dict[int, Any]:
    """Return those of the objects with these ids that the collector tracks: they have been alive since the ids were read."""
    return {id(obj): obj for obj in gc.get_objects() if id(obj) in wanted}


def take_away(owner: Any, value: Any, step: str) -> bool:
    """Take every reference from `owner` to `value` away that is written `step`; return whether there was one.

    An entry of a container goes. An attribute becomes None: whoever reads it later finds that there is nothing, and no error.
    """
    bases = mro_of(type(owner))
    if step.startswith(CONTEXT):
        return _out_of_contexts(owner, value)
    if dict in bases:
        return _out_of_dict(owner, value, step)
    if type(owner) in _SEQUENCES:
        places = [place for place, item in enumerate(owner) if item is value]
        for place in reversed(places):
            del owner[place]
        return bool(places)
    if set in bases:
        set.discard(owner, value)
        return True
    if step == GRADIENT and _is_tensor(bases):
        owner.grad = None
        return True
    if type in bases:
        return _out_of_class(owner, value)
    return _out_of_slots(owner, value) or any(_out_of_dict(space, value, step) for space in _spaces(owner))


def _is_tensor(bases: Types) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.__dict__["Tensor"] in bases


def _spaces(owner: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts of an object's attributes; the parts of a torch module come by their names, too."""
    attributes = attributes_of(owner)
    if attributes is not None:
        yield attributes
        yield from (attributes[name] for name in TRANSPARENT if dict in mro_of(type(attributes.get(name))))


def _out_of_dict(owner: Any, value: Any, step: str) -> bool:
    keys = [key for key, held in list(dict.items(owner)) if held is value or key is value]
    if keys and step.startswith(".") and (cls := _class_of(owner)) is not None:
        return _out_of_class(cls, value)
    if step.startswith(".") or _is_shared_by_instances(owner):
        for key in keys:
            owner[key] = None
    else:
        for key in keys:
            del owner[key]
    return bool(keys)


def _class_of(space: dict[Any, Any]) -> Any:
    """Return the class whose attributes a dict is; None for any other dict. A class notices a change only if it is asked to."""
    classes = (obj for obj in gc.get_referrers(space) if type in mro_of(type(obj)))
    return next((cls for cls in classes if any(ref is space for ref in gc.get_referents(namespace_of(cls)))), None)


def _is_shared_by_instances(space: dict[Any, Any]) -> bool:
    """Say whether a dict has the attributes of all instances of a class (`self.__dict__ = self._shared_state`)."""
    spaces = {id(obj): obj for obj in gc.get_referrers(space) if type(obj) is dict}
    classes = [cls for inner in spaces.values() if (cls := _class_of(inner)) is not None]
    inits = (namespace_of(cls).get("__init__") for cls in classes)
    return any("__dict__" in init.__code__.co_names for init in inits if type(init) is types.FunctionType)


def _out_of_class(cls: Any, value: Any) -> bool:
    names = [name for name, held in list(namespace_of(cls).items()) if held is value]
    for name in names:
        type.__setattr__(cls, name, None)
    return bool(names)


def _out_of_slots(owner: Any, value: Any) -> bool:
    found = False
    for base in mro_of(type(owner)):
        for slot in list(namespace_of(base).values()):
            if "__slots__" in namespace_of(base) and hasattr(type(slot), "__set__") and _has(slot, owner, value):
                slot.__set__(owner, None)
                found = True
    return found


def _has(slot: Any, owner: Any, value: Any) -> bool:
    try:
        return type(slot).__name__ == "member_descriptor" and slot.__get__(owner) is value
    except AttributeError:  # a slot without a value
        return False


def break_cycles_of(obj: Any) -> None:
    """Empty a tensor that nothing but a cycle leads to, as the collector would if it saw that: gradient, hooks, attributes."""
    if not _is_tensor(mro_of(type(obj))):
        return
    if obj.is_leaf:
        obj.grad = None
    for hooks in (obj._backward_hooks, obj._post_accumulate_grad_hooks):
        if hooks:
            hooks.clear()
    (attributes_of(obj) or {}).clear()


def _out_of_contexts(node: Any, value: Any) -> bool:
    """Give variables that have this value None, in each context with `node` in its mapping; return whether any had it.

    Raises:
        RuntimeError: a context is in force, in a thread that runs.
    """
    contexts = [obj for obj in gc.get_objects() if type(obj) is contextvars.Context and _is_part_of(node, obj)]
    found = False
    for context in contexts:
        for variable in [variable for variable, held in context.items() if held is value]:
            context.run(variable.set, None)
            found = True
    return found


def _is_part_of(node: Any, context: contextvars.Context) -> bool:
    """Say whether the mapping of a context contains a node. Copies of a context share nodes."""
    todo: list[Any] = [context]
    while todo:
        for part in gc.get_referents(todo.pop()):
            if part is node:
                return True
            if name_of(type(part)).startswith(HAMT):
                todo.append(part)
    return False
