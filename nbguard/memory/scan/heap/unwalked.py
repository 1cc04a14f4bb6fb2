"""The unwalked rest of a scan, as one object of the walk: the remainder of long graphs, and tensors beyond a limit.

Whatever the rest may hold counts as held by it, as far as counts and gc show: tensors with more references in C++ than the
walk has found, storages shared with more tensors, and the referents of Python objects that the walk left out.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, Any

from nbguard.memory.scan.heap.kinds import LEAF

if TYPE_CHECKING:
    from nbguard.memory.scan.heap.walk import Walk

_CHUNK = 4096


def fill_rest(walk: Walk, nodes: list[Any]) -> None:
    """Let the rest refer to all that it may hold of the objects and storages that the walk met, and look into that.

    `nodes` are the autograd nodes that gc tracks and no root had led to: contexts of the user's functions, nodes with hooks.
    """
    if walk.rest is None:
        return
    held = set(_behind_skipped(walk))
    for node in nodes:
        if id(node) not in walk.number:
            held.update(number for ref in gc.get_referents(node) if (number := walk.add(ref)) is not None)
    walk.run()
    held |= _held_in_cpp(walk)
    walk.children[walk.rest] = sorted({*walk.children[walk.rest], *held} - {walk.rest})
    walk.holds[walk.rest] = _shared_storages(walk)


def _behind_skipped(walk: Walk) -> list[int]:
    added: list[int] = []
    for at in range(0, len(walk.skipped), _CHUNK):
        behind = gc.get_referents(*walk.skipped[at : at + _CHUNK])
        different = {id(obj): obj for obj in behind}.values()  # most refer to their class alone
        numbers = (walk.add(obj) for obj in different if walk.kinds.of(type(obj)) is not LEAF)
        added += [number for number in numbers if number is not None]
    return added


def exported_storages(walk: Walk) -> set[int]:
    """Return the storages that something outside Python may point into, as a library that was given one by DLPack.

    It has a tensor of its own, or one that Python has, too. The latter takes no gradient, or DLPack would refuse it: of those
    that do, a reducer of DistributedDataParallel knows the tensor and not its address. Empty where not all was walked.
    """
    autograd = walk.referents.autograd
    if autograd is None or walk.rest is not None:
        return set()
    held = (n for n in _held_in_cpp(walk) if not autograd.requires_grad(walk.objects[n]))
    return {storage for n in held for storage in walk.holds.get(n, ())} | set(_shared_storages(walk))


def _held_in_cpp(walk: Walk) -> set[int]:
    """Return the tensors that C++ has more references to than the walk accounts for."""
    autograd = walk.referents.autograd
    assert autograd is not None
    known: Counter[int] = Counter()
    for parent in compress(range(len(walk.children)), map({"tensor", "graph", "script"}.__contains__, walk.kind)):
        shown = {id(ref) for ref in gc.get_referents(walk.objects[parent])}
        known.update(child for child in walk.children[parent] if id(walk.objects[child]) not in shown)
    tensors = compress(range(len(walk.objects)), map("tensor".__eq__, walk.kind))
    return {n for n in tensors if autograd.cpp_references(walk.objects[n]) > known[n]}


def _shared_storages(walk: Walk) -> list[int]:
    """Return the storages that more tensors share than the walk met."""
    torch: Any = sys.modules["torch"]
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return list(range(len(walk.storages)))
    probe = torch.empty(0, device="cpu")
    address = probe.untyped_storage()._cdata
    itself = count(address) - 1  # 1 where a storage's Python object counts from then on, as in 2.13, not in 2.4
    known = [itself] * len(walk.storages)
    alone = _references_in_a_list() + 1
    for n, storages in walk.holds.items():
        if walk.kind[n] == "tensor":
            unpacked = sys.getrefcount(walk.objects[n]) < alone  # made by our asking: the graph has another one
            for storage in storages:
                known[storage] += 1 + unpacked
    refs = walk.tracker.storages
    return [n for n, ref in enumerate(refs) if ref is None or count(ref.cdata) > known[n]]


def _references_in_a_list() -> int:
    probe = [object()]
    return sys.getrefcount(probe[0])
