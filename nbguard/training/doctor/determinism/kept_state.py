"""The state of the user's objects besides parameters and buffers that a step may change, kept, compared, and put back.

Attributes, lists, dicts and sets, tensors and arrays in them, variables of closures and globals that the code names, and
generators of random numbers: all that is reached from the modules, their hooks and the loss. State that Python does not show
(files, iterators, C++ state of extensions) cannot be put back; `opaque` names the iterators among it.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbguard.memory.scan.heap.kinds import attributes_of, mro_of, name_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.training.doctor.determinism.digests import flat_bytes
from nbguard.training.doctor.determinism.seeds import state_of

_MOST = 50_000
"""Most objects that are examined; a model with its hooks has some hundreds."""
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), range, slice, type(Ellipsis)})
_LEFT_ALONE = frozenset({"Learner", "DataLoaders", "Dataset", "Datasets", "TfmdLists", "Path", "PosixPath", "InteractiveShell"})
"""Classes that lead away from the model: a Learner's hook has its callback, and that its Learner."""
_MISSING: Any = object()


@dataclass(slots=True)
class Place:
    """One thing that can change: how to see whether it has, and how to put it back."""

    name: str  # as the user would write it
    kind: str  # attribute, list, set, tensor, array, generator, variable
    is_changed: Callable[[], bool]
    restore: Callable[[], None]


class KeptState:
    """The state of all that is reached from some objects, as it is now."""

    def __init__(self, roots: Iterable[tuple[str, Any]], fixed: Iterable[Any] = ()) -> None:
        """Keep the state.

        Args:
            roots: (name, object) to start from.
            fixed: tensors that a step does not touch, as it runs on copies of them: parameters and buffers.
        """
        self.opaque: list[str] = []
        self.is_complete: bool = True
        self.generators: list[tuple[str, Any]] = []
        self._torch: Any = sys.modules["torch"]
        self._numpy: Any = sys.modules.get("numpy")
        self._libraries = library_paths()
        self._fixed = {id(tensor) for tensor in fixed}
        self._alive: list[Any] = []  # so that no id is used twice
        self.places: list[Place] = []
        self._walk(deque(roots))

    def restore(self, but: Place | None = None) -> None:
        """Put everything back that has changed, except one place."""
        for place in self.places:
            if place is not but and place.is_changed():
                place.restore()

    def changed(self) -> list[Place]:
        """Return the places that have changed since."""
        return [place for place in self.places if place.is_changed()]

    def _walk(self, queue: deque[tuple[str, Any]]) -> None:
        seen: set[int] = set()
        while queue:
            name, obj = queue.popleft()
            if id(obj) in seen or type(obj) in _ATOMS:
                continue
            if len(seen) >= _MOST:
                self.is_complete = False
                return
            seen.add(id(obj))
            self._alive.append(obj)
            queue.extend(self._parts(name, obj))

    def _parts(self, name: str, obj: Any) -> Iterator[tuple[str, Any]]:
        """Keep one object's own state, and yield the objects that it leads to, each with its name."""
        bases = mro_of(type(obj))
        if self._torch.Tensor in bases:
            if id(obj) not in self._fixed:
                self._keep_tensor(name, obj)
        elif self._numpy is not None and self._numpy.ndarray in bases:
            self._keep_array(name, obj)
        elif (state := state_of(obj)) is not None:
            self._keep_generator(name, obj, *state)
        elif dict in bases:
            self._keep_dict(name, obj, "{}[{!r}]", "entry")
            yield from ((f"{name}[{_key(key)}]", value) for key, value in dict.items(obj))
            yield from self._attributes(name, obj)
        elif list in bases or deque in bases:
            self._keep_sequence(name, obj, list if list in bases else deque)
            yield from ((f"{name}[{place}]", value) for place, value in enumerate(obj))
        elif set in bases:
            self._keep_set(name, obj)
        elif tuple in bases:
            yield from ((f"{name}[{place}]", value) for place, value in enumerate(tuple.__iter__(obj)))
        elif types.FunctionType in bases or types.MethodType in bases or partial in bases:
            yield from self._callable(name, obj)
        elif type in bases:
            yield from self._class(name, obj)
        elif types.ModuleType in bases or name_of(type(obj)) in _LEFT_ALONE:
            return
        elif hasattr(type(obj), "__next__"):
            self.opaque.append(name)
        else:
            yield from self._attributes(name, obj)
            yield name_of(type(obj)), type(obj)

    def _callable(self, name: str, obj: Any) -> Iterator[tuple[str, Any]]:
        if type(obj) is types.MethodType:
            yield from ((f"{name}.__self__", obj.__self__), (name, obj.__func__))
        elif type(obj) is types.FunctionType:
            yield from self._function(obj)
        else:
            yield from ((name, obj.func), (name, obj.args), (name, obj.keywords))

    def _attributes(self, name: str, obj: Any) -> Iterator[tuple[str, Any]]:
        attributes = attributes_of(obj)
        if attributes is None:
            return
        self._keep_dict(name, attributes, "{}.{}", "attribute")
        for key, value in list(attributes.items()):
            if key == "_modules":
                yield from self._modules(name, value)
            elif key in ("_parameters", "_buffers"):
                self._keep_dict(name, value, "{}.{}", "attribute")
            elif "_hooks" in key and dict in mro_of(type(value)):
                self._keep_dict(f"{name}.{key}", value, "{}[{!r}]", "entry")
                yield from ((f"{name}.{key}", hook) for hook in list(dict.values(value)))
            else:
                yield f"{name}.{key}", value

    def _modules(self, name: str, modules: Any) -> Iterator[tuple[str, Any]]:
        self._keep_dict(name, modules, "{}.{}", "attribute")
        for key, module in modules.items():
            yield (f"{name}[{key}]" if key.isdigit() else f"{name}.{key}"), module

    def _function(self, function: Any) -> Iterator[tuple[str, Any]]:
        """Keep the variables of a closure, and of the user's own functions the globals that they name."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = _content(cell)
            self._keep(variable, "variable", partial(_content, cell), partial(_fill, cell))
            yield variable, content
        if function.__code__.co_filename.startswith(self._libraries):
            return
        for variable in sorted(set(_names(function.__code__))):
            if variable in function.__globals__:
                spaces = function.__globals__
                self._keep(
                    variable,
                    "variable",
                    partial(spaces.get, variable, _MISSING),
                    partial(spaces.__setitem__, variable),
                )
                value = spaces[variable]
                if type in mro_of(type(value)) and str(value.__module__).partition(".")[0] in sys.stdlib_module_names:
                    continue
                yield variable, value

    def _class(self, name: str, cls: Any) -> Iterator[tuple[str, Any]]:
        """Keep the class attributes of the user's own classes, and the objects that their methods name."""
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None) or ""
        if cls.__module__ in sys.stdlib_module_names or file.startswith(self._libraries) or cls.__module__ == "builtins":
            return
        for key, value in list(vars(cls).items()):
            if type(value) is types.FunctionType:
                yield f"{name}.{key}", value
            elif not key.startswith("__") and not hasattr(type(value), "__get__"):
                self._keep(
                    f"{name}.{key}",
                    "attribute",
                    partial(_class_attribute, cls, key),
                    partial(setattr, cls, key),
                )
                yield f"{name}.{key}", value

    def _keep(self, name: str, kind: str, read: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        before = read()
        self.places.append(Place(name, kind, lambda: not _is_same(read(), before), lambda: put(before)))

    def _keep_dict(self, name: str, mapping: Any, form: str, kind: str) -> None:
        """Keep the entries of a dict, each as a place of its own, and which entries there are, in their order.

        An `OrderedDict` has a list of its keys beside the dict: changes by the dict's own methods break it.
        """
        base: Any = OrderedDict if OrderedDict in mro_of(type(mapping)) else dict
        before = dict(base.items(mapping))

        def put(key: Any, value: Any) -> None:
            if value is _MISSING:
                base.pop(mapping, key, None)
            else:
                base.__setitem__(mapping, key, value)

        for key in before:
            label = form.format(name, key) if type(key) in _ATOMS else f"{name}[…]"
            self._keep(label, kind, partial(dict.get, mapping, key, _MISSING), partial(put, key))

        def is_other() -> bool:
            """Say whether there are new keys, or the old ones in another order."""
            return list(base.keys(mapping)) != [key for key in before if dict.__contains__(mapping, key)]

        def reset() -> None:
            kept = [(key, dict.__getitem__(mapping, key)) for key in before if dict.__contains__(mapping, key)]
            base.clear(mapping)
            for key, value in kept:
                base.__setitem__(mapping, key, value)

        self.places.append(Place(f"{name} (new entries)", kind, is_other, reset))

    def _keep_sequence(self, name: str, sequence: Any, base: Any) -> None:
        before = list(base.__iter__(sequence))

        def is_changed() -> bool:
            now = list(base.__iter__(sequence))
            return len(now) != len(before) or not all(map(_is_same, now, before))

        def restore() -> None:
            base.clear(sequence)
            base.extend(sequence, before)

        self.places.append(Place(name, "list", is_changed, restore))

    def _keep_set(self, name: str, members: Any) -> None:
        before = set(members)

        def restore() -> None:
            set.clear(members)
            set.update(members, before)

        self.places.append(Place(name, "set", lambda: set(members) != before, restore))

    def _keep_tensor(self, name: str, tensor: Any) -> None:
        torch = self._torch
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_inference():
            return
        with torch._C.DisableTorchFunctionSubclass():
            before, version = tensor.detach().clone(), tensor._version

        def is_changed() -> bool:
            with torch._C.DisableTorchFunctionSubclass():
                now = tensor.detach()
                return tensor._version != version or now.shape != before.shape or not _same_bits(torch, now, before)

        def restore() -> None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                tensor.data.copy_(before)
            set_version = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
            if set_version is not None:  # since 2.4; a graph that had saved the tensor can still run backward
                set_version((tensor,), (version,))

        self.places.append(Place(name, "tensor", is_changed, restore))

    def _keep_array(self, name: str, array: Any) -> None:
        if array.dtype.hasobject or not array.flags.writeable:
            return
        before = array.copy()

        def restore() -> None:
            array[...] = before

        self.places.append(Place(name, "array", lambda: array.tobytes() != before.tobytes(), restore))

    def _keep_generator(self, name: str, generator: Any, before: Any, put: Callable[[Any], object]) -> None:
        def is_changed() -> bool:
            now = state_of(generator)
            return now is not None and not _is_same_state(now[0], before)

        self.generators.append((name, generator))
        self.places.append(Place(name, "generator", is_changed, lambda: (put(before), None)[1]))


def _same_bits(torch: Any, one: Any, other: Any) -> bool:
    """Say whether two tensors of one shape have the same bytes: NaN is NaN, and −0 is not 0."""
    if one.dtype != other.dtype:
        return False
    return bool(torch.equal(flat_bytes(one), flat_bytes(other)))


def _is_same(one: Any, other: Any) -> bool:
    """Say whether two values are the same: the same object, or equal numbers or texts."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _ATOMS and (one == other or (one != one and other != other))


def _is_same_state(one: Any, other: Any) -> bool:
    """Say whether two states of a generator are the same: tuples, dicts, arrays and tensors of numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same_state, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same_state(one[key], other[key]) for key in one)
    if hasattr(one, "tolist"):
        return bool(one.tolist() == other.tolist())
    return bool(one == other)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes that a code names, also in the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names(constant)


def _class_attribute(cls: type, key: str) -> Any:
    return vars(cls).get(key, _MISSING)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _fill(cell: types.CellType, value: Any) -> None:
    if value is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _key(key: Any) -> str:
    return repr(key) if type(key) in _ATOMS else "…"
