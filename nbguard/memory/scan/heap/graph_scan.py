"""A sample of the autograd graph of tensors, with its operations and the bytes that they saved."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.graphs import Graphs, sequence_of
from nbguard.memory.scan.heap.kinds import Kinds, mro_of
from nbguard.memory.scan.heap.walk import weak_storage

_MOST_NODES = 3000
"""Most nodes that a sample goes into; a model of some hundred layers has that many in a batch."""
_LEAF = "AccumulateGrad"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphScan:
    """The graph that leads to some tensors. Holds no object of the user's."""

    operations: frozenset[int]  # numbers that autograd gives them: they grow with time
    saved: dict[int, int]  # bytes of each storage that it alone keeps, parameters apart, by the storage's address
    blocks: dict[int, int]  # the same by the address of the memory itself
    largest: Any = None  # a weak reference to the largest of them, a `StorageWeakRef`; None: it saves nothing

    @property
    def nbytes(self) -> int:
        """Return the bytes that the graph has saved."""
        return sum(self.saved.values())


def look_at(tensors: Iterable[Any], given: Iterable[Any] = ()) -> GraphScan | None:
    """Return the graph of tensors, or None where it is too long to go through. The `given` tensors are not its own."""
    autograd, kinds = Autograd(), Kinds()
    graphs = Graphs(autograd, kinds, _MOST_NODES)
    nodes: dict[int, Any] = {}

    def link(_: Any, node: Any) -> None:
        nodes[id(node)] = node

    for tensor in tensors:
        root = graphs.root_of(tensor)
        if root is not None:
            nodes[id(root)] = root
            graphs.walk(root, link, _ignore)
    if graphs.cut:
        return None
    inner = [node for node in nodes.values() if type(node).__name__ != _LEAF]
    others = {_address(autograd, tensor) for tensor in given}
    others |= {_address(autograd, node.variable) for node in nodes.values() if type(node).__name__ == _LEAF}
    storages = {}
    for value in (value for node in inner for value in autograd.graph_referents(node)):
        if kinds.of(type(value)) == "tensor" and (address := _address(autograd, value)) and address not in others:
            storages[address] = autograd.storage(value)
    largest = max(storages.values(), key=lambda storage: storage.nbytes(), default=None)
    return GraphScan(
        operations=frozenset(map(sequence_of, inner)),
        saved={address: storage.nbytes() for address, storage in storages.items()},
        blocks={storage.data_ptr(): storage.nbytes() for storage in storages.values()},
        largest=None if largest is None else weak_storage(largest),
    )


def _address(autograd: Autograd, tensor: Any) -> int:
    try:
        return int(autograd.storage(tensor)._cdata)
    except (RuntimeError, AttributeError, NotImplementedError):  # sparse and wrapper tensors have no storage of their own
        return 0


def _ignore(_: Any) -> None:
    """Do nothing: nodes left out are counted in `Graphs.cut`."""


def tensors_of(value: Any) -> list[Any]:
    """Return the tensors that a result of a model is or has, as deep as models return them."""
    torch: Any = sys.modules["torch"]
    found, waiting = [], [value]
    for _ in range(64):
        if not waiting:
            break
        each = waiting.pop()
        kinds = mro_of(type(each))
        if torch.Tensor in kinds:
            found.append(each)
        elif tuple in kinds or list in kinds:
            waiting += list(tuple.__iter__(each) if tuple in kinds else list.__iter__(each))
        elif dict in kinds:
            waiting += list(dict.values(each))
    return found
