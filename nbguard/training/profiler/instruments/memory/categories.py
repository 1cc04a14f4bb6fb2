"""Storages by category (models, gradients, optimizers, inputs), each counted once, and those older than the profile.

Goes by the dicts that optimizers keep tensors in, and holds none of these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, mro_of
from nbguard.training.profiler.analysis.memory import recorded_batch as memory
from nbguard.training.profiler.analysis.memory.recorded_batch import Stock

# --- The storages of the tensors that lived when a profile began, and those of them that a fit freed, or made its own.


class OlderStorages:
    """Holds the number of torch's own weak reference to each storage. It keeps no memory of a device alive.

    A data set may be a list of 100,000 tensors, and an object for each (`StorageWeakRef`) takes ten times as long to make.
    """

    def __init__(self) -> None:
        self._held: dict[Any, dict[int, tuple[int, int]]] = {}  # by device and address: bytes, weak reference
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        self._is_freed = torch.UntypedStorage._expired
        weakref.finalize(self, _let_go, torch.UntypedStorage._free_weak_ref, self._held)
        autograd = Autograd()
        for tensor in Kinds().tracked({"tensor"}):
            gradient = autograd.grad(tensor) if autograd.is_leaf(tensor) else None
            for owner in (tensor,) if gradient is None else (tensor, gradient):
                try:
                    storage = autograd.storage(owner)
                    key, nbytes, device = storage.data_ptr(), storage.nbytes(), storage.device
                except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and wrappers have no storage
                    continue
                if nbytes and key not in (held := self._held.setdefault(device, {})):
                    held[key] = nbytes, storage._weak_ref()

    def spent(self, device: str, rounding: int, owned: Container[int]) -> int:
        """Return the bytes on a device that were freed since, or that the storages at the addresses `owned` have."""
        return sum(
            -(-nbytes // rounding) * rounding
            for where, held in self._held.items()
            if str(where) == device
            for key, (nbytes, weak) in held.items()
            if key in owned or self._is_freed(weak)
        )


def _let_go(free: Callable[[int], None], held: dict[Any, dict[int, tuple[int, int]]]) -> None:
    for of_device in held.values():
        for _, weak in of_device.values():
            free(weak)


_MOST_MODULES = 16
_DEEPEST = 6
_CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple)

Addresses = dict[int, tuple[str, int]]
"""The category and the bytes of each storage, by its address."""


class Stocktaker:
    """Counts the storages on one device. Knows the modules that were called, weakly."""

    def __init__(self, device: str, rounding: int, older: OlderStorages) -> None:
        """`older`: the storages that lived when the profile began."""
        self._device = device
        self._older = older
        self._rounding = rounding
        self._kinds = Kinds()
        self._autograd = Autograd()
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._inputs: Addresses = {}
        self._kept: set[int] = set()

    def call(self, module: Any, *inputs: Any) -> None:
        """Note that a module is about to be called with `inputs`, gradients being as they are."""
        if len(self._modules) < _MOST_MODULES:
            self._modules[id(module)] = weakref.ref(module)
        with _plain():
            self._inputs = {}
            self._put(self._inputs, memory.INPUTS, self._tensors(inputs))
            self._kept = {key for key, (name, _) in self._of_modules().items() if name == memory.GRADIENTS}

    def take(self, optimizer: Any) -> tuple[Stock, Addresses]:
        """Return the bytes of each category while gradients are there, and which storages they are."""
        with _plain():
            addresses = self._of_modules()
            self._put(addresses, memory.STATE, self._tensors(self._state(optimizer)))
        for key, fact in self._inputs.items():
            addresses.setdefault(key, fact)
        total: dict[str, int] = {}
        for name, nbytes in addresses.values():
            total[name] = total.get(name, 0) + nbytes
        kept = sum(addresses[key][1] for key in self._kept if key in addresses and addresses[key][0] == memory.GRADIENTS)
        stock = Stock(
            parameters=total.get(memory.PARAMETERS, 0),
            buffers=total.get(memory.BUFFERS, 0),
            gradients=total.get(memory.GRADIENTS, 0),
            kept_gradients=kept,
            state=total.get(memory.STATE, 0),
            inputs=total.get(memory.INPUTS, 0),
            spent=self._older.spent(self._device, self._rounding, addresses),
        )
        return stock, addresses

    def _of_modules(self) -> Addresses:
        addresses: Addresses = {}
        modules = [module for ref in self._modules.values() if (module := ref()) is not None]
        parts = [part for module in modules for part in _submodules(module)]
        for name, place in ((memory.PARAMETERS, "_parameters"), (memory.BUFFERS, "_buffers")):
            self._put(addresses, name, self._tensors([attributes.get(place) for attributes in parts]))
        parameters = self._tensors([attributes.get("_parameters") for attributes in parts])
        gradients = [self._autograd.grad(parameter) for parameter in parameters if self._autograd.is_leaf(parameter)]
        self._put(addresses, memory.GRADIENTS, self._tensors(gradients))
        return addresses

    def _state(self, optimizer: Any) -> list[Any]:
        """Return the `state` of a torch optimizer, or of a Learner's, and of the torch optimizer in an `OptimWrapper`."""
        inner = attribute_of(optimizer, "opt")
        return [attribute_of(optimizer, "state"), *(self._state(inner) if self._kinds.of(type(inner)) == "optimizer" else ())]

    def _tensors(self, value: Any, depth: int = 0) -> Iterator[Any]:
        """Yield the tensors in nested lists, tuples and dicts (their values)."""
        cls = type(value)
        if self._kinds.of(cls) == "tensor":
            yield value
        elif depth < _DEEPEST:
            base = next((base for base in _CONTAINERS if base in mro_of(cls)), None)
            items = () if base is None else list(dict.values(value)) if base is dict else list(base.__iter__(value))
            for item in items:
                yield from self._tensors(item, depth + 1)

    def _put(self, addresses: Addresses, name: str, tensors: Iterable[Any]) -> None:
        """Note the storages of tensors under a category, but those that have one already."""
        for tensor in tensors:
            try:
                storage = self._autograd.storage(tensor)
                if str(storage.device) != self._device:
                    continue
                key, nbytes = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and wrappers have no storage
                continue
            if nbytes:
                addresses.setdefault(key, (name, -(-nbytes // self._rounding) * self._rounding))


def device_of(module: Any, inputs: Any) -> str:
    """Return the device of a module, by its first parameter or buffer, else by its first input; empty if it has none."""
    kinds = Kinds()
    for attributes in _submodules(module):
        for place in ("_parameters", "_buffers"):
            for tensor in list(dict.values(attributes.get(place) or {})):
                if kinds.of(type(tensor)) == "tensor":
                    return str(sys.modules["torch"]._C.TensorBase.device.__get__(tensor))
    first = next((value for value in inputs if kinds.of(type(value)) == "tensor"), None) if type(inputs) is tuple else None
    return "" if first is None else str(sys.modules["torch"]._C.TensorBase.device.__get__(first))


def _submodules(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the attribute dicts of a module and all modules in it, each once."""
    todo, visited = [module], {id(module)}
    while todo:
        attributes = attributes_of(todo.pop(0))
        if attributes is None:
            continue
        yield attributes
        for child in list(dict.values(attributes.get("_modules") or {})):
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                todo.append(child)


def _plain() -> Any:
    """Return a context that runs no tensor subclass's own code."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass()
