"""The watch over new tensors. Each is known by a weak reference and by its owner, the test or fixture that made it.

A scan of the heap after each test would cost more than most tests. A tensor is cheap to find while it is young, in the youngest
generation of Python's collector. So that generation is read at the beginning of each collection, before its objects grow old,
and when a test or a fixture begins or ends. Each object that lives until then is read once or twice. Gradients and saved
tensors of graphs have no Python object until somebody asks, so the living tensors are asked for them when a test ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import ref

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.graph_scan import look_at
from nbguard.memory.scan.heap.kinds import Kinds, WeakTypeTable, loaded_class
from nbguard.memory.scan.heap.walk import weak_storage
from nbguard.memory.scan.weak_references import weak_reference

if TYPE_CHECKING:
    from nbguard.memory.reports.notices.notice import StorageKey

TEST = 0
"""The owner of tensors that the test itself makes, with its fixtures of the scope `function`. Others are ids of fixtures."""
_TENSORS = frozenset({"tensor"})
_PRUNE_AT = 1000
"""Number of old tensors at which the dead ones are forgotten. Later it is twice the number of the living, plus this."""


class TensorBirths:
    """Weak records of the tensors that each owner made, and of the storages that are older."""

    def __init__(self) -> None:
        self.owner = TEST
        self.tracked = ""  # kind of device whose tensors count; empty until PyTorch is imported
        self._kinds: Kinds | None = None
        self._made: dict[int, dict[int, ref[Any]]] = {}  # by owner: tensors by id
        self._old: dict[int, ref[Any]] = {}
        self._old_storages: dict[StorageKey, Any] = {}  # weak references to storages that were there before the owners' own
        self._new_gradients: dict[StorageKey, Any] = {}  # the same of those that the present test has left on older tensors
        self._prune_at = _PRUNE_AT
        self._is_reading = False
        self._reader: _Reader | None = None

    def start(self) -> None:
        """Count all present tensors as old, and read young ones from now on."""
        if (kinds := self._known_kinds()) is not None:
            self._grow_old(kinds.tracked(_TENSORS))
        gc.callbacks.append(self._before_collection)
        self._is_reading = True

    def stop(self) -> None:
        """Read no more."""
        if self._is_reading:
            gc.callbacks.remove(self._before_collection)
            self._is_reading = False

    def _before_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self.note()

    def _known_kinds(self) -> Kinds | None:
        """Return the kinds of objects as soon as PyTorch has defined its tensors."""
        if self._kinds is None and loaded_class("torch", "Tensor") is not None:
            self._kinds = Kinds(WeakTypeTable)  # it is asked until the last test
        return self._kinds

    def _reader_of(self) -> _Reader:
        """Return a reader of the storages on the kind of device that counts."""
        if self._reader is None or self._reader.tracked != self.tracked:
            self._reader = _Reader(self.tracked)
        return self._reader

    def note(self) -> None:
        """Note the young tensors that are new as the present owner's."""
        if (kinds := self._known_kinds()) is None:
            return
        made = self._made.setdefault(self.owner, {})
        for tensor in kinds.tracked(_TENSORS, 0):
            if not self._is_known(tensor) and (weak := weak_reference(tensor)) is not None:
                made[id(tensor)] = weak

    def _is_known(self, tensor: Any) -> bool:
        key = id(tensor)
        return any((weak := known.get(key)) is not None and weak() is tensor for known in (self._old, *self._made.values()))

    def left(self, owner: int) -> dict[StorageKey, int]:
        """Return the bytes of each new storage that an owner's tensors still hold.

        For a test, its gradients on older tensors count, too.
        """
        if self._kinds is None or not self.tracked:
            return {}
        weak_ones = list(self._made.get(owner, {}).values())  # at once: a collection may add to them at any line
        made = [tensor for weak in weak_ones if (tensor := weak()) is not None]
        with _no_code_of_subclasses():
            reader = self._reader_of()
            found = reader.held_by(made)
            if owner == TEST:
                older = (tensor for weak in self._old.values() if (tensor := weak()) is not None)
                gradients = {key: (nbytes, weak_storage(each)) for key, nbytes, each in reader.gradients(older)}
                self._new_gradients = {key: weak for key, (_, weak) in gradients.items() if not self._is_old(key)}
                found |= {key: gradients[key][0] for key in self._new_gradients}
        return {key: nbytes for key, nbytes in found.items() if not self._is_old(key)}

    def _is_old(self, key: StorageKey) -> bool:
        weak = self._old_storages.get(key)
        return weak is not None and not weak.expired()

    def settle(self, owner: int) -> None:
        """Count the living tensors of an owner as old, after its judgement."""
        left = self._made.pop(owner, {})
        if self._kinds is not None and self.tracked:
            self._grow_old(tensor for weak in left.values() if (tensor := weak()) is not None)
        if owner == TEST:
            self._old_storages |= self._new_gradients
            self._new_gradients = {}

    def hand_over(self, keys: Iterable[StorageKey], heir: int) -> None:
        """Make the test's tensors on these storages a fixture's, which keeps them."""
        wanted, reader = set(keys), self._reader_of()
        made, heirs = self._made.get(TEST, {}), self._made.setdefault(heir, {})
        with _no_code_of_subclasses():
            for key, weak in list(made.items()):
                tensor = weak()
                if tensor is not None and any(each in wanted for each, _, _ in reader.storages((tensor,))):
                    heirs[key] = made.pop(key)

    def _grow_old(self, tensors: Iterable[Any]) -> None:
        reader = self._reader_of()
        with _no_code_of_subclasses():
            for tensor in tensors:
                weak = weak_reference(tensor)
                if weak is None:
                    continue
                self._old[id(tensor)] = weak
                for key, _, storage in reader.storages((tensor, *reader.gradient_of(tensor))):
                    self._old_storages[key] = weak_storage(storage)
        if len(self._old) > self._prune_at:
            self._old = {key: weak for key, weak in self._old.items() if weak() is not None}
            self._old_storages = {key: weak for key, weak in self._old_storages.items() if not weak.expired()}
            self._prune_at = 2 * len(self._old) + _PRUNE_AT


def _no_code_of_subclasses() -> Any:
    """Return a context that keeps reads of a tensor's attributes from running code of a subclass or mode."""
    return sys.modules["torch"]._C.DisableTorchFunction()


class _Reader:
    """Reads the storages of tensors on one kind of device."""

    def __init__(self, tracked: str) -> None:
        self.tracked = tracked
        self._autograd = Autograd()

    def storages(self, tensors: Iterable[Any]) -> Iterator[tuple[StorageKey, int, Any]]:
        """Yield (key, bytes, storage) of each tensor that has one on the device."""
        todo = list(tensors)
        while todo:
            tensor = todo.pop()
            try:
                storage = self._autograd.storage(tensor)
                device = str(storage.device)
                if device.partition(":")[0] != self.tracked:
                    continue
                address, nbytes = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, AttributeError, NotImplementedError):  # sparse and wrapper tensors have parts instead
                todo += self._autograd.parts(tensor)
                continue
            if address and nbytes:
                yield (device, address), nbytes, storage

    def gradient_of(self, tensor: Any) -> tuple[Any, ...]:
        """Return a leaf's gradient, if it has one."""
        try:
            if not self._autograd.requires_grad(tensor) or not self._autograd.is_leaf(tensor):
                return ()
            gradient = self._autograd.grad(tensor)
        except RuntimeError:
            return ()
        return () if gradient is None else (gradient,)

    def gradients(self, tensors: Iterable[Any]) -> Iterator[tuple[StorageKey, int, Any]]:
        """Yield (key, bytes, storage) of each gradient of tensors."""
        for tensor in tensors:
            if gradient := self.gradient_of(tensor):
                yield from self.storages(gradient)

    def held_by(self, tensors: list[Any]) -> dict[StorageKey, int]:
        """Return the bytes of tensors, of their gradients, and of all that their graphs have saved."""
        found = {key: nbytes for key, nbytes, _ in chain(self.storages(tensors), self.gradients(tensors))}
        with_graph = [tensor for tensor in tensors if self._autograd.has_graph(tensor)]
        for device in {key[0] for key, _, _ in self.storages(with_graph)}:
            own = [tensor for tensor in with_graph if any(key[0] == device for key, _, _ in self.storages((tensor,)))]
            graph = look_at(own)
            if graph is not None:
                found |= {(device, address): nbytes for address, nbytes in graph.blocks.items()}
        return found
