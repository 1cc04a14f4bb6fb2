"""The storages that one object leads to, by weak references that tell which of them outlive the object."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nbguard.memory.core.facts import StorageFact
from nbguard.memory.scan.devices.cuda import tracked_device
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.walk import Walk, never_walked, weak_storage
from nbguard.memory.scan.parked import parked_addresses, unseen_by_modes
from nbguard.memory.scan.pause import keep_garbage
from nbguard.memory.scan.scan import Notebook


@dataclass(frozen=True, slots=True)
class WeakHoldings:
    """The storages that an object led to when it was scanned, each with torch's own weak reference."""

    storages: tuple[tuple[StorageFact, Any], ...]  # (storage, its StorageWeakRef)
    named: frozenset[int]  # ids of the objects behind it that had a name of their own

    @property
    def is_alive(self) -> bool:
        """Return whether any of the storages has not been freed."""
        return not all(weak.expired() for _, weak in self.storages)

    def alive(self) -> tuple[StorageFact, ...]:
        """Return the storages whose memory has not been freed."""
        return tuple(fact for fact, weak in self.storages if not weak.expired())


class _ModuleStops:
    """Ids of objects that no walk looks into, collected again only when modules changed, as that takes 10 ms."""

    def __init__(self) -> None:
        self._modules: dict[str, int] = {}
        self._stops: frozenset[int] = frozenset()

    def get(self) -> frozenset[int]:
        """Return the ids."""
        modules = {name: id(module) for name, module in list(sys.modules.items())}
        if modules != self._modules:
            self._modules, self._stops = modules, frozenset(never_walked(Kinds()))
        return self._stops


_module_stops = _ModuleStops()


class WeakLook:
    """A scan of the storages that one object after another leads to. It runs no user's code and no collection. Needs PyTorch.

    Modules are gone through once, as long as none is imported, and classes once for the first object that is no plain tensor:
    throw the scan away after a cell.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    @cached_property
    def _tracked(self) -> str:
        return tracked_device()

    @cached_property
    def _stop(self) -> set[int]:
        return self._notebook.internals() | _module_stops.get()

    @cached_property
    def _kinds(self) -> Kinds:
        return Kinds()

    def holdings(self, obj: object, names: Collection[int] = ()) -> WeakHoldings:
        """Return the storages of the tracked device that `obj` leads to, without those that only its autograd graph keeps.

        `names` are the ids of the objects that have names: those that `obj` leads to are noted. No object is kept alive.
        """
        torch: Any = sys.modules["torch"]
        if type(obj) is torch.Tensor and all(ref is torch.Tensor for ref in gc.get_referents(obj)):
            return WeakHoldings(_of_tensor(torch, obj, self._tracked), frozenset())
        walk = Walk(self._tracked, self._stop, self._kinds)
        walk.follows_graphs = False  # a scan leaves something behind for each node of a graph
        walk.parked = parked_addresses() if self._tracked == "cpu" else ()
        with keep_garbage(), torch._C.DisableTorchFunction(), unseen_by_modes():
            walk.add(obj)
            walk.run()
        storages = zip(walk.storages, walk.tracker.storages, strict=True)
        named = frozenset(ref for ref in names if ref in walk.number and ref != id(obj))
        return WeakHoldings(tuple((fact, weak) for fact, weak in storages if weak is not None), named)


def _of_tensor(torch: Any, tensor: Any, tracked: str) -> tuple[tuple[StorageFact, Any], ...]:
    """Return the storages of a plain tensor and of its gradient: by far the most names that a cell binds again."""
    held = []
    for one in (tensor, tensor.grad if tensor.is_leaf else None):
        if one is None or one.layout is not torch.strided or one.device.type != tracked:
            continue
        storage = one.untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            fact = StorageFact(str(storage.device), storage.nbytes(), storage.data_ptr())
            held.append((fact, weak_storage(storage)))
    return tuple(held)
