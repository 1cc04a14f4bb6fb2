"""Parked tensors, whose data was moved to host memory, held weakly, and the hooks that a move would cut off."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from nbguard.memory.core.facts import ParkedFact
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, mro_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.pause import pause_main_thread

# --- torch without the user's additions, where a call runs no code of theirs; the hooks of a module; and torch.compile's use.


# --- The hooks that a module of PyTorch's has, as the user put them up.


_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: Any) -> Iterator[dict[int, Any]]:
    """Yield the dicts that keep a module's hooks, by their numbers; only those that have any."""
    for kind in _KINDS:
        hooks = attribute_of(module, kind)
        if hooks:
            yield hooks


# --- torch.compile, and whether it compiled anything in this process.


def has_compiled() -> bool:
    """Say whether a compiler backend has been used since the last reset. Optimizers import the compiler without using it."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(module, "cached_backends", None)
    if module is None or type(known) is not dict:
        return module is not None
    return any(backend is not None for backend in known.values())  # None if code that is not to be compiled has run


def name_in_model(name: str) -> str:
    """Return the name of a submodule as in the model that was compiled: torch.compile puts a step of its own into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Leave out tensor subclasses' code and all modes: of functions, of dispatch (fake tensors), of inference."""
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Keep this thread's dispatch modes (a simulated device, a FLOP counter) from seeing operations of ours.

    Unpacking a graph's saved tensors is one. A tensor subclass's own dispatch goes on, unlike under `plain_torch`: torch's
    nested and distributed tensors are unpacked by theirs.
    """
    dispatch: Any = sys.modules["torch.utils._python_dispatch"]
    with dispatch._disable_current_modes():
        yield


# --- Hooks on the end of a parameter's graphs, where its gradient is added up; a move to another device would cut them off.
#
# torch gives a parameter that changes its device a new end. A hook on the former one is not told and never runs again:
# processes that train together would drift apart without a word.


_SYNCHRONISED = "its gradients are synchronised with other processes (DistributedDataParallel), and a move would end that"
_HOOKED = "a hook on its gradient (of the AccumulateGrad node) would not survive a move"


def hooked_storages(tracker: WeakTracker) -> dict[int, str]:
    """Return why storages of a device must stay: hooks on where gradients are added up would be lost."""
    with plain_torch():
        living = {
            number: [tensor for ref in refs if ref is not None and (tensor := ref()) is not None]
            for number, refs in (tracker.tensors or {}).items()
        }
        reasons = dict[int, str]()
        for tensor in chain.from_iterable(living.values()):
            if _may_move(tensor) and _is_hooked(tensor):
                reasons |= dict.fromkeys((id(tensor), id(tensor.grad)), _HOOKED)
        for tensor in filter(_may_move, _synchronised(tracker)):
            reasons |= dict.fromkeys((id(tensor), id(tensor.grad)), _SYNCHRONISED)
        return {
            number: reasons[id(tensor)] for number, tensors in living.items() for tensor in tensors if id(tensor) in reasons
        }


def _may_move(tensor: Any) -> bool:
    """Say whether parking a tensor would change the device of where its gradient is added up."""
    return bool(tensor.device.type != "cpu" and tensor.is_leaf and tensor.requires_grad)


def _synchronised(tracker: WeakTracker) -> Iterator[Any]:
    """Yield the parameters in a model wrapped by DistributedDataParallel, whose hooks are C++'s and invisible."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    wrapper = None if module is None else module.__dict__["DistributedDataParallel"]
    todo = [obj for ref in tracker.objects.values() if wrapper in mro_of(type(obj := ref()))]
    while todo:
        spaces = attributes_of(todo.pop()) or {}
        yield from (tensor for tensor in spaces.get("_parameters", {}).values() if tensor is not None)
        todo += spaces.get("_modules", {}).values()


def _is_hooked(tensor: Any) -> bool:
    """Say whether the end of a leaf's graphs has hooks of Python's, other than those that the tensor itself keeps."""
    torch: Any = sys.modules["torch"]
    with torch.enable_grad():
        end = tensor.expand_as(tensor).grad_fn.next_functions[0][0]
    hooks = (obj for obj in gc.get_referents(end) if dict in mro_of(type(obj)) and dict.__len__(obj))
    return any(hook is not tensor._backward_hooks for hook in hooks)


class SimulatedMemory(Protocol):
    """The memory of a device whose tensors lie on the host, so that its model alone is told of a move."""

    name: str  # as a device's

    def leaves(self, storage: Any) -> None:
        """Free the memory of a storage."""

    def comes_back(self, storage: Any) -> None:
        """Give a storage memory again; its out-of-memory error where there is no room."""


@dataclass(eq=False, slots=True, kw_only=True)
class Parked:
    """The storages parked under one name. Its `hooks` stop a parked module from being called, or `wake` it for that.

    They are parked as long as any tensor lives on them: also one that was made of a parked tensor, which may be gone since. So
    are the storages that a parked tensor has got on the host meanwhile, as by `net.half()`.
    """

    label: str
    device: str
    tensors: list[weakref.ref[Any]] = field(default_factory=list)
    storages: list[Any] = field(default_factory=list)  # a StorageWeakRef of each, as it was parked
    hooks: list[Any] = field(default_factory=list)
    wake: Callable[[str], None] | None = None  # brings what is parked under a label back when it is used; None: it is an error
    home: SimulatedMemory | None = None  # the memory that it has left, where only a model of it is told

    def alive(self) -> list[Any]:
        """Return the tensors that are still parked: they live, and the user has not moved them to a device."""
        with plain_torch():
            return [tensor for ref in self.tensors if (tensor := ref()) is not None and tensor.device.type == "cpu"]


PARKED: list[Parked] = []
"""Everything parked in this process. Written by nbguard.memory.cleanup.apply.parking alone."""


def storage_of(tensor: Any) -> Any:
    """Return a tensor's storage, whatever its subclass says."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.untyped_storage(tensor)


def parked_storages(parked: Parked) -> dict[int, int]:
    """Return the bytes of the storages that are parked, by address."""
    torch: Any = sys.modules["torch"]
    first = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in parked.storages)
    storages = [*map(storage_of, parked.alive()), *first]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage is not None}


def parked_facts() -> tuple[ParkedFact, ...]:
    """Return a fact on each name of parked tensors that still live."""
    facts = []
    for parked in PARKED:
        storages = parked_storages(parked)
        if storages:
            tensors = max(len(parked.alive()), len(storages))
            facts.append(ParkedFact(parked.label, parked.device, sum(storages.values()), tensors))
    return tuple(facts)


def parked_addresses() -> frozenset[int]:
    """Return the addresses of all parked storages: where CPU tensors are tracked, these do not count."""
    return frozenset(address for parked in PARKED for address in parked_storages(parked))


def movable(tracker: WeakTracker) -> dict[int, list[Any]]:
    """Return the tensors of each storage that can be moved: all tensors that share it are Python's, with plain data.

    A weak reference that died with the scan was to a tensor that only C++ has: an autograd graph's, a sparse tensor's part.
    """
    tensors_of = {}
    with plain_torch():
        for number, refs in (tracker.tensors or {}).items():
            tensors = [None if ref is None else ref() for ref in refs]
            if all(tensor is not None and _is_plain(tensor) for tensor in tensors):
                tensors_of[number] = tensors
    return tensors_of


def _is_plain(tensor: Any) -> bool:
    """Say whether a tensor's data can be exchanged: nothing but the tensor knows where it lies.

    Storages shared with numpy or another process are marked by torch itself as not resizable.
    """
    torch: Any = sys.modules["torch"]
    if tensor.device.type == "cpu" and not storage_of(tensor).resizable():
        return False
    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested
    return not odd and tensor.layout is torch.strided


_FIXED = "an autograd graph, numpy or another holder outside Python shares it, or a nested, quantized or conjugate tensor"


def fixed_storages(tracker: WeakTracker) -> dict[int, str]:
    """Return why storages cannot be moved to another device, by number."""
    return dict(shared_storages(tracker)) | hooked_storages(tracker)


def shared_storages(tracker: WeakTracker) -> tuple[tuple[int, str], ...]:
    """Return (number, why) of the storages that something other than plain tensors of Python's knows."""
    can = movable(tracker).keys() - tracker.exported
    return tuple((number, _FIXED) for number in range(len(tracker.storages)) if number not in can)


def sharing(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the living tensors on each of the storages at `addresses`, also those made since it was parked."""
    by_address = dict[int, list[Any]]()
    with pause_main_thread():
        for tensor in _tensors():
            try:
                address = storage_of(tensor).data_ptr()
            except RuntimeError:  # a tensor without a storage of its own
                continue
            if address in addresses:
                by_address.setdefault(address, []).append(tensor)
        tensor = None  # before the main thread goes on: it would count as a holder
    return by_address


def _tensors() -> list[Any]:
    """Return all tensors of Python's. No generator: on Python 3.10 its frame would be among the objects, and keep them all."""
    return Kinds().tracked({"tensor"})
