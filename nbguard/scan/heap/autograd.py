"""References of tensors and autograd graphs in C++, where Python's gc cannot see them.

Saved tensors are identified by storage by the caller: unpacking makes a new Python tensor at every access. A saved tensor
with hooks of the user's (offloading, checkpointing) is not unpacked, as that would run them: what it packed is looked at.
torch 2.4, at least, does not say which has hooks. There nothing is unpacked while anything is checkpointed: that would run the
forward pass again, and the user's backward pass would then fail. Other hooks do run there.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from operator import is_
from typing import Any

from nbguard.memory.references.graph import BASE, GRADIENT

_SPARSE = ("_indices", "_values", "crow_indices", "col_indices", "values")


class Autograd:
    """Readers of torch's own attributes, taken from the C base classes so that no subclass's code runs."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        base = torch._C.TensorBase
        self.is_leaf = base.__dict__["is_leaf"].__get__
        self.grad = base.__dict__["grad"].__get__
        self.grad_fn = base.__dict__["grad_fn"].__get__
        self.base = base.__dict__["_base"].__get__
        self.storage = torch.Tensor.untyped_storage
        self._use_count = getattr(torch.Tensor, "_use_count", lambda _: 1)
        self.layout = base.__dict__["layout"].__get__
        self.strided = torch.strided
        self.tensor_base = base
        self.saved_names: dict[type, tuple[str, ...]] = {}
        self._may_unpack = hasattr(torch._C._autograd.SavedTensor, "unpack_hook") or not _is_checkpointing()

    def tensor_referents(self, tensor: Any) -> list[Any]:
        """Return the objects that a tensor refers to: its Python attributes, its base, a leaf's gradient; without its graph."""
        return gc.get_referents(tensor) + [value for value, _ in self._in_cpp(tensor)]

    def labels(self, tensor: Any) -> dict[int, str]:
        """Return how each of the things a tensor keeps in C++, but for its graph, is written, by id."""
        return {id(value): label for value, label in self._in_cpp(tensor)}

    def _in_cpp(self, tensor: Any) -> list[tuple[Any, str]]:
        referents = []
        for label, read in ((BASE, self.base), (GRADIENT, self.grad)):
            try:
                value = read(tensor) if label != GRADIENT or self.is_leaf(tensor) else None
            except RuntimeError:  # e.g. a view changed in place: torch refuses to say
                continue
            if value is not None:
                referents.append((value, label))
        return referents

    def has_graph(self, tensor: Any) -> bool:
        """Say whether a tensor was computed in a graph, without asking for its node: that would give it a wrapper."""
        try:
            return not self.is_leaf(tensor)
        except RuntimeError:
            return False

    def cpp_references(self, tensor: Any) -> int:
        """Return how many references C++ (graphs, gradients, views, caches) has to a tensor."""
        return int(self._use_count(tensor)) - 1

    def has_hooks(self, tensor: Any) -> bool:
        """Say whether the user has registered hooks on a tensor."""
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return any(getattr(self.tensor_base, name).__get__(tensor) for name in names)

    def sparse_parts(self, tensor: Any) -> list[Any]:
        """Return the tensors a sparse tensor is made of; it has no storage of its own."""
        parts: list[Any] = []
        if self.layout(tensor) is self.strided:
            return parts
        for name in _SPARSE:
            try:
                parts.append(getattr(self.tensor_base, name)(tensor))
            except (RuntimeError, AttributeError, NotImplementedError):
                continue
        return parts

    def graph_referents(self, node: Any) -> list[Any]:
        """Return the objects that an autograd node keeps: its leaf, saved tensors, Python attributes; not earlier nodes."""
        referents = gc.get_referents(node)
        cls = type(node)
        names = self.saved_names.get(cls)
        if names is None:
            names = self.saved_names[cls] = tuple(
                n for n in dir(cls) if n.startswith("_saved_") or n in ("variable", "saved_tensors")
            )
        for name in names:
            try:
                referents += self._saved(node, name)
            except (RuntimeError, AttributeError):  # freed by backward, or changed in place since
                continue
        return referents

    def _saved(self, node: Any, name: str) -> list[Any]:
        if name == "variable":
            return [node.variable]
        if not self._may_unpack:
            return []
        raw = getattr(node, "_raw" + name if name.startswith("_") else "_raw_" + name, None)
        packed = list(raw) if isinstance(raw, (tuple, list)) else [] if raw is None else [raw]
        hooked = [saved for saved in packed if getattr(saved, "unpack_hook", None) is not None]
        if hooked:
            return [saved.data for saved in hooked]
        value = getattr(node, name)
        return [
            v
            for v in (value if type(value) in (tuple, list) else (value,))
            if type(v) not in (int, float, bool, str, type(None))
        ]


def _is_checkpointing() -> bool:
    """Say whether a graph waits for its backward pass with nothing saved but how to compute it again."""
    placeholder = getattr(sys.modules.get("torch.utils.checkpoint"), "_Holder", None)
    return any(map(partial(is_, placeholder), map(type, gc.get_objects())))
