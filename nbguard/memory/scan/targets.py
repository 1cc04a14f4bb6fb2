"""Targets of `%reset_gpu`: whatever `del` accepts, looked up without running the user's code where possible."""

from __future__ import annotations

import ast
import collections
import dis
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from nbguard.cell_names import cell_names
from nbguard.errors import TargetError
from nbguard.memory.core import advice
from nbguard.memory.core.facts import Target
from nbguard.memory.scan.heap.kinds import Types, attributes_of, is_frozen, loaded_class, mro_of, name_of, namespace_of
from nbguard.spelling import did_you_mean

# --- Columns and elements of pandas' tables, with the reference that `del` takes away, read from pandas' own blocks.


_LABELS = frozenset({"string", "integer"})
"""Kinds of labels that are compared without code of the user's."""
_HERE = 3
"""References to an array that only its block has, while this reads it: the block's, a variable's and an argument's."""


def part_of_table(table: Any, key: object) -> tuple[Any, tuple[Any, ...]] | None:
    """Return (object, its container) of the reference that `del table[key]` takes away; None where none is known.

    pandas keeps columns of a kind in one block, which stays until the last of them goes. An element goes as its column is
    copied, which frees it where nothing else has the array.
    """
    kinds = (loaded_class("pandas", "DataFrame"), loaded_class("pandas", "Series"))
    manager: Any = (attributes_of(table) or {}).get("_mgr") if type(table) in kinds else None
    if manager is None or type(key) not in (str, int):
        return None
    try:
        labels, blocks = manager.axes[0], manager.blocks
        if labels.inferred_type not in _LABELS or not labels.is_unique or key not in labels:
            return None
        place = labels.get_loc(key)
        if type(table) is kinds[0]:
            block = next(block for block in blocks if place in block.mgr_locs)
            return (block, (blocks,)) if len(block.mgr_locs) == 1 else None
        values: Any = blocks[0].values
        kind: type = type(values)
        if (
            kind is not loaded_class("numpy", "ndarray")
            or values.base is not None
            or values.dtype.kind != "O"
            or sys.getrefcount(values) != _HERE
        ):
            return None
        value = values[place]
        return (value, (values,)) if sum(other is value for other in values) == 1 else None
    except AttributeError:  # another pandas
        return None


# --- Targets as the user writes them.


_MISSING: Any = object()
_KEYS = Types((str, int, float, bool, bytes, tuple, type(None)))
_SEQUENCES = Types((list, tuple, deque))
_LISTS = Types((list, deque))
_WITHOUT_ATTRIBUTES = Types((bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, type(None)))
"""Classes whose objects have no attributes but those of the class."""
_PARTS = ("_modules", "_parameters", "_buffers")
"""Attributes of a module that hold its parts by name."""
_FIELDS = Types(cls for cls in (getattr(collections, "_tuplegetter", None),) if cls is not None)
"""The class of the fields of named tuples: to read one runs none of the user's code."""
_PLAIN = Types((type, object))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def parse_target(text: str) -> ast.expr:
    """Return the one thing that `del text` would delete; TargetError if it is no such thing."""
    try:
        statement = ast.parse(f"del {text}").body
    except SyntaxError:
        statement = []
    match statement:
        case [ast.Delete(targets=[(ast.Name() | ast.Attribute() | ast.Subscript()) as target])]:
            return target
    raise TargetError(
        f"{text} is not something that can be freed: give a name or a part of it, as in  "
        + advice.release_names(("learn", "runs['a']", "exp.learn")).command
    )


def resolve_targets(
    texts: Iterable[str], namespace: dict[str, Any], out: dict[int, Any], hidden: dict[str, Any]
) -> tuple[Target, ...]:
    """Return the target of each text, in order; TargetError, before anything is touched, if one of them does not exist."""
    parsed = [(text, parse_target(text)) for text in texts]
    resolved = [(target, _resolve(text, target, namespace, out, hidden)) for text, target in parsed]
    return tuple(replace(found, turn=_turn(target, namespace, out)) for target, found in resolved)


def _turn(target: ast.expr, namespace: dict[str, Any], out: dict[int, Any]) -> tuple[int, int]:
    """Return minus the depth of a part and minus its place in a list: the least is deleted first."""
    if output_label(target, out) or not isinstance(target, (ast.Attribute, ast.Subscript)):
        return 0, 0
    depth = 0
    step: ast.expr = target
    while isinstance(step, (ast.Attribute, ast.Subscript)):
        depth, step = depth + 1, step.value
    owner = lookup(target.value, namespace) if isinstance(target, ast.Subscript) else _MISSING
    parts = owner if type(owner) in _LISTS else _numbered_modules(owner)
    key = _key(target.slice, namespace) if isinstance(target, ast.Subscript) and parts is not None else None
    return -depth, -(key % max(len(parts), 1)) if parts is not None and type(key) is int else 0


def _resolve(text: str, target: ast.expr, namespace: dict[str, Any], out: dict[int, Any], hidden: dict[str, Any]) -> Target:
    output = output_label(target, out)
    if output:
        return Target(text=text, root=output, value_kind="a displayed result")
    if isinstance(target, ast.Name):
        value = lookup(target, namespace)
        if target.id in hidden and hidden[target.id] is value:
            raise TargetError(
                f"{text} is IPython's own, so it cannot be freed (a displayed result is freed by  "
                + advice.release_output("Out[3]").command
                + ")"
            )
        return Target(text=text, root=target.id, value_kind=name_of(type(value)))
    if not isinstance(target, (ast.Attribute, ast.Subscript)):
        raise AssertionError(target)
    owner = lookup(target.value, namespace)
    if owner is _MISSING:
        return Target(text=text)
    if type(owner) is types.ModuleType and isinstance(target, ast.Attribute):
        value, _ = _part(target, owner, namespace)
        return Target(text=text, root=f"{owner.__name__}.{target.attr}", value_kind=name_of(type(value)))
    value, containers = _part(target, owner, namespace)
    if value is _MISSING and isinstance(target, ast.Subscript):
        value, containers = part_of_table(owner, _key(target.slice, namespace)) or (_MISSING, ())
    if value is _MISSING:
        refuse_unknown_attribute(target, owner, text)
        return Target(text=text)
    return Target(text=text, containers=tuple(map(id, containers)), value=id(value), value_kind=name_of(type(value)))


def refuse_unknown_attribute(target: ast.expr, owner: Any, text: str) -> None:
    """Raise TargetError if a target, typed as `text`, is an attribute that `del` cannot delete because `owner` has none."""
    if isinstance(target, ast.Attribute) and _cannot_delete(owner, target.attr):
        raise _no_attribute(owner, target.attr, text)


def _cannot_delete(owner: Any, name: str) -> bool:
    """Say whether `del owner.name` must fail: no such attribute, and the class deletes attributes in the usual way."""
    bases = mro_of(type(owner))
    deletes = next(base for base in bases if "__delattr__" in namespace_of(base))
    modules = sys.modules.get("torch.nn")
    usual = deletes is object or (modules is not None and deletes is modules.__dict__["Module"])
    return usual and attributes_of(owner) is not None and not any(name in namespace_of(base) for base in bases)


def refuse_fixed(text: str, namespace: dict[str, Any], out: dict[int, Any]) -> None:
    """Raise TargetError if `del text` must fail, as the object that has the part keeps it for good; say what goes instead."""
    target = whole = parse_target(text)
    while isinstance(whole, (ast.Attribute, ast.Subscript)) and not output_label(whole, out):
        owner = lookup(whole.value, namespace)
        if not _keeps(owner, whole):
            break
        whole = whole.value
    if whole is not target and isinstance(target, (ast.Attribute, ast.Subscript)):
        kept_by = name_of(type(lookup(target.value, namespace)))
        instead = advice.release_names((ast.unparse(whole),)).command
        raise TargetError(f"{text} cannot be deleted: {kept_by} does not allow it; the whole is freed by  " + instead)


def _keeps(owner: Any, part: ast.Attribute | ast.Subscript) -> bool:
    """Say whether `del` cannot take a part out of an object whatever its value is."""
    if owner is _MISSING:
        return False
    bases = mro_of(type(owner))
    spaces = [namespace_of(base) for base in bases]
    if isinstance(part, ast.Subscript):
        arrays = (loaded_class("numpy", "ndarray"), loaded_class("torch", "Tensor"))
        deletes = next((space["__delitem__"] for space in spaces if "__delitem__" in space), None)
        return deletes is None or _only_raises(deletes) or any(cls in bases for cls in arrays)
    slot = next((space[part.attr] for space in spaces if part.attr in space), None)
    is_read_only = type(slot) is property and slot.fdel is None
    return is_read_only or (tuple in bases and slot is not None) or is_frozen(type(owner))


def _only_raises(function: Any) -> bool:
    """Say whether a function of Python's never returns, as that of a container which forbids a change."""
    if type(function) is not types.FunctionType:
        return False
    names = {one.opname for one in dis.get_instructions(function)}
    return "RAISE_VARARGS" in names and not any(name.startswith(("RETURN", "YIELD")) for name in names)


def output_label(target: ast.expr, out: dict[int, Any]) -> str:
    """Return `Out[n]` if the target is a displayed result, else an empty string; n is the first that shows this object."""
    match target:
        case ast.Subscript(value=ast.Name(id="Out" | "_oh"), slice=ast.Constant(value=int(number))):
            if number not in out:
                raise TargetError(f"Out[{number}] does not exist: there is no such displayed result")
        case ast.Name(id=name) if name[:1] == "_" and name[1:].isdigit() and int(name[1:]) in out:
            number = int(name[1:])
        case _:
            return ""
    return f"Out[{next(n for n, value in out.items() if value is out[number])}]"


def lookup(expression: ast.expr, namespace: dict[str, Any]) -> Any:
    """Return the object an expression of names, attributes and constant keys stands for, or a mark that it is computed."""
    if isinstance(expression, ast.Name):
        if expression.id not in namespace:
            if module_named(expression.id) is not None:
                return module_named(expression.id)
            raise _no_name(expression.id, _names_of_data(namespace))
        return namespace[expression.id]
    if isinstance(expression, (ast.Attribute, ast.Subscript)):
        owner = lookup(expression.value, namespace)
        if type(owner) is types.ModuleType and isinstance(expression, ast.Attribute) and expression.attr not in owner.__dict__:
            return module_named(f"{owner.__name__}.{expression.attr}") or _part(expression, owner, namespace)[0]
        return _MISSING if owner is _MISSING else _part(expression, owner, namespace)[0]
    return _MISSING


def module_named(name: str) -> types.ModuleType | None:
    """Return a module that has been imported: a report writes its globals as `module.name`, though it has no name here."""
    module = sys.modules.get(name)
    return module if type(module) is types.ModuleType else None


def _names_of_data(namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the names that somebody may have meant: not those of modules, classes and functions, nor any of an `import *`."""
    assigned = _assigned_in_cells(namespace)
    for name, value in namespace.items():
        is_data = not name.startswith("_") and not issubclass(type(value), (type, types.ModuleType, *_FUNCTIONS))
        if is_data and (assigned is None or name in assigned):
            yield name


def _assigned_in_cells(namespace: dict[str, Any]) -> set[str] | None:
    """Return the names that the notebook's cells bind by name; None where no cell has an `import *`, which binds others."""
    cells = namespace.get("In")
    if type(cells) is not list:
        return None
    found = [names for source in cells if type(source) is str and (names := cell_names(source)) is not None]
    return {name for names in found for name in names.bound} if any(names.has_star for names in found) else None


def is_computed(value: Any) -> bool:
    """Say whether `lookup` could not tell a value without running the user's code."""
    return value is _MISSING


def _part(target: ast.Attribute | ast.Subscript, owner: Any, namespace: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return (part of `owner`, the containers that refer to it); the part is a mark if only user code could tell."""
    if isinstance(target, ast.Attribute):
        return _attribute(owner, target.attr, ast.unparse(target))
    key = _key(target.slice, namespace)
    if key is _MISSING:
        return _MISSING, ()
    bases = mro_of(type(owner))
    try:
        if dict in bases and type(key) in _KEYS:
            return _once(dict.__getitem__(owner, key), owner, _held_by(owner))
        if type(owner) in _SEQUENCES and type(key) is int:
            return _once(owner[key], owner, owner)
        if type(key) is int and (modules := _numbered_modules(owner)) is not None:
            parts = list(modules.values())
            return _once(parts[key], modules, parts)
    except (KeyError, IndexError):
        keys = (each for each in dict.keys(owner) if type(each) is str) if type(key) is str and dict in bases else ()
        question = did_you_mean(str(key), keys) if keys else ""
        raise TargetError(f"{ast.unparse(target)} does not exist: {question or 'there is no such key'}") from None
    return _MISSING, ()


def _key(expression: ast.expr, namespace: dict[str, Any]) -> Any:
    """Return the key that is written in brackets, a constant or a name; a mark if it is computed."""
    if isinstance(expression, ast.Name) and expression.id in namespace:
        return namespace[expression.id]
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return _MISSING


def _numbered_modules(owner: Any) -> dict[str, Any] | None:
    """Return the parts of a module that are deleted by number: `del net[0]`."""
    nn = sys.modules.get("torch.nn")
    if nn is None or type(owner) not in Types((nn.__dict__["Sequential"], nn.__dict__["ModuleList"])):
        return None
    return (attributes_of(owner) or {}).get("_modules")


def _once(value: Any, owner: Any, values: Iterable[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the reference to cut, unless the container holds the value more than once: then deleting one frees nothing."""
    return value, (owner,) if sum(other is value for other in values) == 1 else ()


def _held_by(owner: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes and, of a dict, of its entries, which may be the same."""
    attributes = attributes_of(owner)
    if dict in mro_of(type(owner)):
        yield from dict.values(owner)
    if attributes is not None and attributes is not owner:
        yield from attributes.values()


def _attribute(owner: Any, name: str, text: str) -> tuple[Any, tuple[Any, ...]]:
    for base in mro_of(type(owner)):
        slot = namespace_of(base).get(name)
        if type(slot) is types.MemberDescriptorType:
            try:
                return _once(slot.__get__(owner), owner, gc.get_referents(owner))
            except AttributeError:  # a slot without a value
                break
        if type(slot) in _FIELDS and tuple in mro_of(type(owner)):
            return _once(slot.__get__(owner), owner, tuple.__iter__(owner))
    if type in mro_of(type(owner)):
        return _class_attribute(owner, name)
    attributes = attributes_of(owner)
    if attributes is None and type(owner) in _WITHOUT_ATTRIBUTES and not hasattr(type(owner), name):
        raise _no_attribute(owner, name, text)
    if attributes is None:
        return _MISSING, ()
    if name in attributes:
        value, containers = _once(attributes[name], owner, _held_by(owner))
        return value, (*containers, attributes) if containers else ()
    for inner in _PARTS:
        part = attributes.get(inner)
        if part is not None and dict in mro_of(type(part)) and name in part:
            return part[name], (part,)
    bases = [namespace_of(base) for base in mro_of(type(owner))]
    if any(name in base for base in bases) or any("__getattr__" in base for base in bases):
        return _MISSING, ()
    raise _no_attribute(owner, name, text)


def _class_attribute(cls: type, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return an attribute of a class, and its own dict that has it; a mark where a metaclass or a descriptor computes it."""
    made_by = [namespace_of(base) for base in mro_of(type(cls)) if base not in _PLAIN]
    space = next((namespace_of(base) for base in mro_of(cls) if name in namespace_of(base)), None)
    if space is None or any(name in base or "__getattribute__" in base for base in made_by):
        return _MISSING, ()
    value, (attributes,) = space[name], gc.get_referents(space)
    if any("__get__" in namespace_of(base) for base in mro_of(type(value))):
        return _MISSING, ()
    return _once(value, attributes, attributes.values()) if name in namespace_of(cls) else (value, ())


def _no_name(name: str, known: Iterable[str]) -> TargetError:
    said = f"name '{name}' does not exist"
    question = did_you_mean(name, known)
    return TargetError(
        f"{said}: {question}" if question else f"{said} (" + advice.REPORT.command + " lists those that hold memory)"
    )


def _no_attribute(owner: Any, name: str, text: str) -> TargetError:
    """Return the error for an attribute that an object does not have, with the one that may have been meant.

    Args:
        owner: the object.
        name: of the attribute.
        text: the whole target as typed.
    """
    have = {each for base in mro_of(type(owner)) for each in namespace_of(base)} | {*(attributes_of(owner) or ())}
    for inner in _PARTS:
        have |= {*((attributes_of(owner) or {}).get(inner) or ())}
    question = did_you_mean(name, sorted(each for each in have if type(each) is str and not each.startswith("_")))
    said = f"{text} does not exist: {name_of(type(owner))} has no such attribute"
    return TargetError(f"{said}; {question}" if question else said)
