"""From a walk to plain data, that is, the objects that lead to a storage or are an experiment, with labels for each step."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, compress, pairwise
from typing import Any

from nbguard.memory.core.facts import EXPERIMENT_KINDS, KEPT_KINDS, Graph, ModulePart, Node, OwnEnd, Root, StorageFact
from nbguard.memory.core.references.graph import CONTEXT, DEFAULT, FUNCTION, GRAPH, KEY, SOMEWHERE
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import (
    FRAMES,
    TRANSPARENT,
    Types,
    TypeTable,
    Unwalked,
    Writer,
    attributes_of,
    hiding_names,
    is_frozen,
    is_graph_node,
    keeps_entries,
    key_text,
    mro_of,
    name_of,
    namespace_of,
)
from nbguard.memory.scan.heap.walk import Walk, made_for_array
from nbguard.memory.scan.roots.frames import LiveRoot, attached_locals, frame_locals

# --- Labels of references, as the user would write the step from one object to the next: `.model`, `[3]`, ` → graph`.


HAMT = "hamt"
"""The beginning of the names of the classes that make up a context's mapping from variables to values."""
_WRITTEN = Types((dict, list, tuple))
_UNWRITTEN = Types((Unwalked, contextvars.Context))


def _dict_labels(mapping: dict[Any, Any], writer: Writer | None, wanted: set[int]) -> dict[int, str]:
    labels: dict[int, str] = {}
    for position, (key, value) in enumerate(list(dict.items(mapping))):
        if id(value) not in wanted and id(key) not in wanted:
            continue
        if writer is not None and type(key) is str:
            label = writer.label(key, position)
        else:
            label = f"[{key_text(key)}]"
            labels.setdefault(id(key), f"{KEY}{key_text(key)}")
        labels.setdefault(id(value), label)
    return labels


def _function_labels(function: types.FunctionType) -> dict[int, str]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    labels = {id(cell): f" → closure {name}" for name, cell in zip(names, cells, strict=False)}
    labels |= {id(function.__defaults__): DEFAULT, id(function.__kwdefaults__): DEFAULT}
    return labels | {id(function.__globals__): ".__globals__"}


def _frame_labels(frame: types.FrameType) -> dict[int, str]:
    cells = set(frame.f_code.co_cellvars) | set(frame.f_code.co_freevars)
    labels = {}
    for name, value in frame_locals(frame).items():
        its_own = name in cells and type(value) is types.FunctionType and value.__code__ is frame.f_code
        labels[id(value)] = (
            FUNCTION if its_own else f" → {name}"
        )  # that function the frame itself keeps, whatever the cell holds
        if name in cells:
            labels[-id(value)] = f" → {name}"  # the cell around it, see `Labels.of`
    return labels


def _context_labels(node: Any) -> dict[int, str]:
    """Return the labels of the contents of a node of a context's mapping: values by their variables, and further nodes.

    The collector is told of each value, then of its variable (CPython 3.10 to 3.14), of a node below alone.
    """
    parts = gc.get_referents(node)
    labels = {id(part): "" for part in parts if name_of(type(part)).startswith(HAMT)}
    for value, variable in pairwise(parts):
        if type(variable) is contextvars.ContextVar and id(value) not in labels:
            labels[id(value)] = f"{CONTEXT}{variable.name}"
    return labels


def _writers_of_parts(cls: type) -> dict[str, Writer]:
    """Return the writers of the parts of a torch module of this class."""
    return {name: Writer.of_parts(name, cls) for name in TRANSPARENT}


def _slots_of(cls: type) -> list[tuple[str, Any]]:
    spaces = map(namespace_of, mro_of(cls))
    return [(name, slot) for space in spaces for name, slot in space.items() if type(slot) is types.MemberDescriptorType]


def _has_items(cls: type) -> bool:
    """Say whether instances of a class are subscripted: elements of a container that they keep in C are written as theirs."""
    return any("__getitem__" in namespace_of(base) for base in mro_of(cls))


def _field_labels(obj: Any) -> dict[int, str]:
    """Return how the elements of a named tuple are written; none of another class made from a tuple."""
    fields, elements = namespace_of(type(obj)).get("_fields"), list(tuple.__iter__(obj))
    if type(fields) is not tuple or len(fields) != len(elements):
        return {}
    return {
        id(element): f".{name}" for name, element in reversed(list(zip(fields, elements, strict=True))) if type(name) is str
    }


class Labels:
    """Labels of the steps from objects to their referents. Remembers which dicts are attributes of something."""

    def __init__(self, autograd: Autograd | None, class_spaces: Iterable[int] = ()) -> None:
        self._writers: dict[int, Writer] = {space: Writer("__dict__") for space in class_spaces}
        self._closures: dict[int, tuple[str, ...]] = {}  # by id of the tuple of a function's cells: the names of these
        self._autograd = autograd
        self._slots = TypeTable(_slots_of)
        self._hiding = TypeTable(hiding_names)
        self._of_parts = TypeTable(_writers_of_parts)
        self._scripted: set[int] = set()  # TorchScript's wrappers of the parts of modules, and the dicts of their attributes

    def of(self, obj: Any, kind: str, children: list[Any]) -> list[str]:
        """Return the label of each child of `obj`, in order."""
        cls = type(obj)
        is_plain = cls is list or (cls is tuple and id(obj) not in self._closures)
        if is_plain and len(obj) == 1 and [*map(id, obj)] == [*map(id, children)]:
            return ["[0]"]  # the rule below, for chains of a million of them
        known = self._known(obj, kind, set(map(id, children)))
        return [self._label(obj, kind, known, child) for child in children]

    def _known(self, obj: Any, kind: str, wanted: set[int]) -> dict[int, str]:
        cls = type(obj)
        if id(obj) in self._closures:
            names = self._closures[id(obj)]
            return {id(cell): f" → closure {name}" for name, cell in zip(names, obj, strict=False)}
        if cls is dict:
            return _dict_labels(obj, self._writers.get(id(obj)), wanted)
        if cls is list or cls is tuple or cls is deque:
            return {id(item): f"[{i}]" for i, item in reversed(list(enumerate(obj))) if id(item) in wanted}
        if dict in mro_of(cls):
            return self._attribute_labels(obj, wanted) | _dict_labels(obj, self._writers.get(id(obj)), wanted)
        if cls is types.FunctionType:
            self._closures[id(obj.__closure__)] = obj.__code__.co_freevars
            labels = _function_labels(obj)
            return labels if wanted <= labels.keys() else self._attribute_labels(obj, wanted) | labels
        if kind == "frame":
            return _frame_labels(obj)
        if kind == "class":
            self._writers.update((id(space), Writer("__dict__")) for space in gc.get_referents(namespace_of(obj)))
            return {id(value): f".{name}" for name, value in namespace_of(obj).items()}
        if cls is contextvars.Context or name_of(cls).startswith(HAMT):
            return _context_labels(obj)
        if kind == "script":
            return {id(tensor): f".{name}" for name, tensor in cls.items(obj)}
        if id(obj) in self._scripted:
            inner = obj if cls is dict else attributes_of(obj) or {}
            return dict.fromkeys([id(inner), *map(id, inner.values())], "")
        if kind in ("graph", "cell", "array", "part of an array") or cls is types.TracebackType:
            return {}
        known = self._slot_labels(obj) | self._attribute_labels(obj, wanted)
        if tuple in mro_of(cls):
            known |= _field_labels(obj)
        if kind == "tensor" and self._autograd is not None:
            known |= self._autograd.labels(obj)
        return known

    def _attribute_labels(self, obj: Any, wanted: set[int]) -> dict[int, str]:
        """Return how an object's `wanted` attributes are written, and note how the dicts that hold them write theirs."""
        attributes = attributes_of(obj)
        if attributes is None:
            return {}
        cls = type(obj)
        writer = Writer("__dict__", self._hiding.of(cls))
        self._writers[id(attributes)] = writer
        for name in TRANSPARENT:
            if name in attributes:
                parts = _inside(attributes[name])
                self._scripted.update(parts[:2] if len(parts) > 1 else ())
                self._writers.update((part, self._of_parts.of(cls)[name]) for part in parts)
        items = list(attributes.items())
        known = {id(value): writer.label(name) for name, value in items if id(value) in wanted and type(name) is str}
        return known | {id(attributes): ""}

    def _slot_labels(self, obj: Any) -> dict[int, str]:
        labels: dict[int, str] = {}
        taken: set[str] = set()
        for name, slot in self._slots.of(type(obj)):
            label = f" → {name}" if name in taken else f".{name}"  # of two slots of that name an attribute gives the first
            with contextlib.suppress(AttributeError):  # a slot without a value
                labels.setdefault(id(slot.__get__(obj)), label)
            taken.add(name)
        return labels

    def _label(self, obj: Any, kind: str, known: dict[int, str], child: Any) -> str:
        written = known.get(id(child))
        if written is not None:
            return written
        if kind == "tensor" and (type(child) is Unwalked or is_graph_node(type(child))):
            return GRAPH
        if type(child) in _UNWRITTEN:
            return ""
        if type(child) is types.CellType and kind == "frame":
            try:
                return known.get(-id(child.cell_contents), SOMEWHERE)
            except ValueError:  # an empty cell
                return SOMEWHERE
        if type(child) is types.FrameType:
            return f" → {child.f_code.co_name}" if kind == "traceback" else ""
        if kind in ("graph", "traceback", "cell", "array", "part of an array", "script", "frame") or type(child) in FRAMES:
            return ""
        if type(obj) is types.MethodType:
            return ".__self__"
        is_written = type(child) in _WRITTEN and (kind in ("class", "code") or _has_items(type(obj)))
        return "" if is_written else f" → {name_of(type(child))}"


# --- Methods of a class that let go of the things its instances pile up.
#
# A metric keeps its states until `reset()`; a model with adapters has `delete_adapter`.


_METRICS = (frozenset({"reset", "update", "compute"}), frozenset({"reset", "accumulate", "value"}))


def own_end(cls: type) -> OwnEnd:
    """Return the method of a class that lets go of its instance's collected things, or an empty string."""
    names = {name for base in mro_of(cls) for name, value in namespace_of(base).items() if type(value) in _CALLED}
    if any(methods <= names for methods in _METRICS):
        return "reset_all" if "reset_all" in names else "reset"  # the `reset` of a tracker is of its latest metric
    return "delete_adapter" if "delete_adapter" in names else ""


_CALLED = Types((types.FunctionType, property))


_NODE_KIND = {"class": "code", "storage": "tensor", "context": "object"} | dict.fromkeys(
    ("array", "part of an array", "script"), "data"
)
_PARTS: dict[str, ModulePart] = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "modules",
    "_actual_script_module": "modules",  # of a module that `torch.jit.trace` made
}
_WITH_METHODS = frozenset({"object", "model"})
_ALWAYS_LABELLED = frozenset({"learner", "frame", "locals", "traceback"})  # a cleanup goes by these labels
_LABEL_ALL = 30_000
"""Up to so many objects each step gets its label; beyond, only those on a shortest path from a root: writing the label of an
attribute makes Python build the attribute dict of its owner, which must not happen to a whole data structure."""


def compact(walk: Walk, roots: list[tuple[LiveRoot, list[int]]], nbytes: Callable[[StorageFact], int]) -> Graph:
    """Return the walk as a graph. `nbytes` says what the allocator set aside for a storage."""
    kept = compress(range(len(walk.objects)), map(KEPT_KINDS.__contains__, walk.kind))
    relevant = sorted(walk.leading_to({*kept, *walk.holds, *(() if walk.rest is None else (walk.rest,))}))
    new = {old: number for number, old in enumerate(relevant)}
    for old in relevant:
        if walk.kind[old] == "frame" and (view := walk.number.get(attached_locals(walk.objects[old]) or 0)) is not None:
            walk.kind[view] = "locals"
    labelled = None if len(relevant) <= _LABEL_ALL else _on_shortest_paths(walk, new, roots)
    labels = Labels(walk.referents.autograd, walk.class_spaces)
    objects, kinds, holds = walk.objects, walk.kind, walk.holds
    children_of = {old: [child for child in _once(walk.children[old]) if child in new] for old in relevant}
    texts_of: dict[int, list[str]] = {}
    for old in _in_turn(objects, relevant):
        if children_of[old] and (labelled is None or old in labelled or kinds[old] in _ALWAYS_LABELLED):
            children = [objects[child] for child in children_of[old]]
            try:
                texts_of[old] = labels.of(objects[old], kinds[old], children)
            except Exception:  # noqa: BLE001 - as in `Unread.read`, without a call for each object
                walk.unread.note(objects[old])
    nodes, names, ends = [], TypeTable(name_of), TypeTable(own_end)
    parts = _parts_of_modules(walk, relevant if labelled is None else labelled)
    fixed = _fixed(walk, relevant if labelled is None else labelled)
    foreign = _foreign(walk, relevant if labelled is None else labelled)
    for old in relevant:
        obj, kind, children = objects[old], kinds[old], children_of[old]
        texts, type_name = texts_of.get(old), names.of(type(obj))
        nodes.append(
            Node(
                kind=_node_kind(type_name, kind),
                type_name=type_name,
                ref=id(obj),
                children=tuple([new[child] for child in children]),
                labels=tuple(texts) if texts is not None else (SOMEWHERE,) * len(children),
                storages=tuple(holds[old]) if old in holds else (),
                repeated=_repeated(walk.children[old], new),
                module_part=parts.get(id(obj), ""),
                own_end=ends.of(type(obj)) if kind in _WITH_METHODS else "",
                is_foreign=id(obj) in foreign,
                is_fixed=id(obj) in fixed,
            )
        )
        if kind in EXPERIMENT_KINDS:
            walk.tracker.note(obj)
    kept_roots = []
    for root, entries in roots:
        known = tuple(dict.fromkeys(new[entry] for entry in entries if entry in new))
        if known:
            kept_roots.append(
                Root(
                    kind=root.kind,
                    label=root.label,
                    nodes=known,
                    cell=root.cell,
                    what=root.what,
                    ended_by=root.ended_by,
                    module=root.module,
                    is_class=root.is_class,
                    thread=root.thread,
                    registry=root.registry,
                    cache=root.cache,
                    is_shown=root.is_shown,
                    is_ending=root.is_ending,
                )
            )
    storages = tuple(
        fact if (taken := nbytes(fact)) == fact.nbytes else replace(fact, nbytes=taken)  # a copy takes longer than the rest
        for fact in walk.storages
    )
    return Graph(tuple(kept_roots), tuple(nodes), storages, None if walk.rest is None else new[walk.rest])


def _parts_of_modules(walk: Walk, numbers: Iterable[int]) -> dict[int, ModulePart]:
    """Return the dicts of torch modules that have their parameters, buffers and modules, by their ids."""
    parts: dict[int, ModulePart] = {}
    for number in numbers:
        if walk.kind[number] == "model":
            attributes = attributes_of(walk.objects[number]) or {}
            parts |= {at: part for name, part in _PARTS.items() if name in attributes for at in _inside(attributes[name])}
    return parts


def _fixed(walk: Walk, numbers: Iterable[int]) -> set[int]:
    """Return the ids of the objects whose parts stay: frozen ones, their attributes, tuples, and lists made of arrays."""
    frozen, fixed = TypeTable(lambda cls: is_frozen(cls) or keeps_entries(cls)), set[int]()
    for number in numbers:
        obj = walk.objects[number]
        if walk.kind[number] == "array":
            fixed.update(id(walk.objects[made]) for level in made_for_array(walk, number)[1:] for made in level)
        elif walk.kind[number] == "object" and tuple in mro_of(type(obj)):
            fixed.add(id(obj))
        elif walk.kind[number] == "object" and frozen.of(type(obj)):
            fixed |= {id(obj), id(attributes_of(obj))}
    return fixed


def _foreign(walk: Walk, numbers: Iterable[int]) -> set[int]:
    """Return the ids of objects of other people's classes that are no containers, and of their dicts of attributes."""
    is_users, foreign = TypeTable(walk.referents.is_users_class), set[int]()
    for number in numbers:
        obj = walk.objects[number]
        if walk.kind[number] in ("object", "data") and type(obj) not in _WRITTEN and not is_users.of(type(obj)):
            foreign |= {id(obj), id(attributes_of(obj))}
    return foreign


def _inside(parts: Any) -> list[int]:
    """Return the ids of a dict of a module's parts, and of TorchScript's wrapper and its attributes where it is in one."""
    is_wrapper = name_of(type(parts)) in ("OrderedDictWrapper", "OrderedModuleDict")
    inner = attributes_of(parts) if is_wrapper else None
    return [id(parts)] if inner is None else [id(parts), id(inner), *map(id, inner.values())]


def _in_turn(objects: Sequence[Any], numbers: Sequence[int]) -> Iterable[int]:
    """Return objects as their references are written: a function says how the tuple of its cells is, an owner how its dict."""
    functions, others, dicts = list[int](), list[int](), list[int]()
    for number in numbers:
        kind = type(objects[number])
        (dicts if kind is dict else functions if kind is types.FunctionType else others).append(number)
    return chain(functions, others, dicts)


def _once(children: list[int]) -> Iterable[int]:
    return children if len(children) < 2 else dict.fromkeys(children)


def _repeated(children: list[int], new: dict[int, int]) -> tuple[int, ...]:
    """Return the children that are referred to more than once, for each reference but the first."""
    if len(children) < 2 or len(set(children)) == len(children):
        return ()
    return tuple(new[child] for child, count in Counter(children).items() if child in new for _ in range(count - 1))


def _is_goal(walk: Walk, number: int) -> bool:
    """Say whether an object is a goal of a graph: a holder of a storage, an experiment, a keeper of a pool, or the rest."""
    return number in walk.holds or number == walk.rest or walk.kind[number] in KEPT_KINDS


def _on_shortest_paths(walk: Walk, new: dict[int, int], roots: Iterable[tuple[LiveRoot, list[int]]]) -> set[int]:
    """Return the objects on the shortest path from a root to each holder of a storage and each experiment."""
    above: dict[int, int | None] = {entry: None for _, entries in roots for entry in entries if entry in new}
    todo = deque(above)
    while todo:
        parent = todo.popleft()
        for child in walk.children[parent]:
            if child in new and child not in above:
                above[child] = parent
                todo.append(child)
    on_a_path: set[int] = set()
    for goal in above:
        at: int | None = goal if _is_goal(walk, goal) else None
        while at is not None and at not in on_a_path:
            on_a_path.add(at)
            at = above[at]
    return on_a_path


def _node_kind(type_name: str, kind: str) -> Any:
    return "data" if type_name in ("DataFrame", "Series") else _NODE_KIND.get(kind, kind)
