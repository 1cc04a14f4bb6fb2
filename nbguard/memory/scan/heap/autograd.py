"""References of tensors and autograd graphs in C++, where Python's gc cannot see them.

Saved tensors are identified by storage by the caller: unpacking makes a new Python tensor at every access. A saved tensor
with hooks of the user's (offloading, checkpointing) is not unpacked, as that would run them: its packed object is walked
instead. torch 2.4, at least, does not say which has hooks. There nothing is unpacked while anything is checkpointed: that would
run the forward pass again, and the user's backward pass would then fail. Other hooks do run there.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from functools import partial
from operator import is_
from typing import Any
from weakref import ref

from nbguard.memory.core.references.graph import BASE, GRADIENT
from nbguard.memory.scan.heap.kinds import Types, TypeTable, attributes_of, mro_of, namespace_of

_SEQUENCES = Types((tuple, list))
_ATOMS = Types((int, float, bool, str, type(None)))
_SPARSE = ("_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


class Autograd:
    """Readers of torch's own attributes, taken from the C base classes so that no subclass's code runs."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        base = torch._C.TensorBase
        self.is_leaf: Any = base.__dict__["is_leaf"].__get__
        self.grad: Any = base.__dict__["grad"].__get__
        self.grad_fn: Any = base.__dict__["grad_fn"].__get__
        self.base: Any = base.__dict__["_base"].__get__
        self.requires_grad: Any = base.__dict__["requires_grad"].__get__
        self.storage: Any = torch.Tensor.untyped_storage
        self._use_count = getattr(torch.Tensor, "_use_count", lambda _: 1)
        self.layout: Any = base.__dict__["layout"].__get__
        self.strided: Any = torch.strided
        self.jagged: Any = getattr(torch, "jagged", None)
        self._device = base.__dict__["device"].__get__
        self._plain = Types((torch.Tensor, torch.nn.Parameter))
        self._functorch: Any = getattr(torch._C, "_functorch", None)
        self._is_wrapper = getattr(self._functorch, "is_functorch_wrapped_tensor", lambda _: False)
        self.tensor_base = base
        self._saved_names = TypeTable(_names_of_saved)
        self._saved_tensor: Any = torch._C._autograd.SavedTensor
        self._packing: dict[int, Any] | None = None  # checkpoint's other hooks, by the id of the cell that both have
        self.reads_changed: bool = hasattr(torch._C._autograd.SavedTensor, "data")
        """Whether torch shows tensors that were changed in place since a graph saved them."""
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

    def hooks(self, tensor: Any) -> list[Any]:
        """Return the dicts of the hooks that the user has registered on a tensor."""
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return [hooks for name in names if (hooks := getattr(self.tensor_base, name).__get__(tensor))]

    def has_gradient_with_graph(self, tensor: Any) -> bool:
        """Say whether a leaf's gradient was computed in a graph of its own, which leads back to the leaf."""
        try:
            gradient = self.grad(tensor) if self.is_leaf(tensor) else None
        except RuntimeError:
            return False
        return gradient is not None and self.has_graph(gradient)

    def may_close_a_cycle(self, tensor: Any) -> bool:
        """Say whether a tensor has things (a gradient, hooks, attributes) that can be taken from it to end a cycle."""
        return self.has_gradient_with_graph(tensor) or bool(self.hooks(tensor)) or bool(attributes_of(tensor))

    def parts(self, tensor: Any) -> list[Any]:
        """Return the tensors that one without a storage of its own is made of.

        It is a sparse one, the wrapper of a transform, or a jagged one, which has them as attributes, too.
        """
        parts: list[Any] = []
        if has_own_dispatch(type(tensor)):
            return parts
        if self._is_wrapper(tensor):
            return [self._functorch.get_unwrapped(tensor)]
        layout = self.layout(tensor)
        if layout is self.strided:
            return parts
        if layout is self.jagged:
            return self._parts_of_jagged(tensor)
        for name in _SPARSE:
            try:
                parts.append(getattr(self.tensor_base, name)(tensor))
            except (RuntimeError, AttributeError, NotImplementedError):
                continue
        return parts

    def _parts_of_jagged(self, tensor: Any) -> list[Any]:
        """Return the tensors that C++ keeps of a jagged view, as often as it does so: each of two records has them all.

        Its `_base` counts as one of them.
        """
        base = self.base(tensor)
        if base is None:
            return []
        attributes = attributes_of(tensor) or {}
        cache = attributes.get("_metadata_cache")
        kept = [*attributes.values(), *(cache.values() if type(cache) is dict else ())]
        tensors = [value for value in kept if self.tensor_base in mro_of(type(value))]
        return [*tensors, *(value for value in tensors if value is not base)]

    def is_opaque(self, tensor: Any, tracked: str) -> bool:
        """Say whether a tensor without a storage has memory on this kind of device all the same, as oneDNN's do."""
        return type(tensor) in self._plain and str(self._device(tensor)).partition(":")[0] == tracked

    def graph_referents(self, node: Any) -> list[Any]:
        """Return the objects that an autograd node keeps: its leaf, saved tensors, Python attributes; not earlier nodes."""
        referents = gc.get_referents(node)
        for name in self._saved_names.of(type(node)):
            try:
                referents += self._saved(node, name)
            except (RuntimeError, AttributeError):  # freed by backward
                continue
        return referents

    def _behind(self, hook: Any) -> Iterator[Any]:
        """Yield a hook, and for PyTorch's checkpoint its other hook and the arguments, which are in no Python object."""
        yield hook
        if type(hook) is not types.FunctionType or hook.__module__ != "torch.utils.checkpoint":
            return
        if self._packing is None:
            self._packing = {
                id(cell): ref(each)  # a reference of ours would count as a holder
                for each in gc.get_objects()
                if type(each) is types.FunctionType and each.__name__ == "pack_hook"
                for cell in each.__closure__ or ()
            }
        for cell in hook.__closure__ or ():
            if (other := self._packing.get(id(cell), lambda: None)()) is not None:
                yield other
            frame = next(iter(gc.get_referents(cell)), None)
            for argument in (attributes_of(frame) or {}).get("saved_args", ()):
                if type(argument) is self._saved_tensor:
                    yield argument.data

    def _saved(self, node: Any, name: str) -> list[Any]:
        if name == "variable":
            return [node.variable]
        if not self._may_unpack:
            return []
        raw = getattr(node, "_raw" + name if name.startswith("_") else "_raw_" + name, None)
        packed = list(raw) if isinstance(raw, (tuple, list)) else [] if raw is None else [raw]
        hooked = [saved for saved in packed if getattr(saved, "unpack_hook", None) is not None]
        if hooked:
            return [kept for saved in hooked for kept in (saved.data, *self._behind(saved.unpack_hook))]
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed in place since
            value = [saved.data for saved in packed]
        return [v for v in (value if type(value) in _SEQUENCES else (value,)) if type(v) not in _ATOMS]


def has_own_dispatch(cls: type) -> bool:
    """Say whether a class of tensors has a `__torch_dispatch__` that is not torch's: to ask for a shape may run it."""
    for base in mro_of(cls):
        space = namespace_of(base)
        if "__torch_dispatch__" in space:
            return str(space.get("__module__")).partition(".")[0] != "torch"
    return False


def _names_of_saved(cls: type) -> tuple[str, ...]:
    """Return the attributes that hold the saved tensors of a class's nodes."""
    return tuple(name for name in dir(cls) if name.startswith("_saved_") or name in ("variable", "saved_tensors"))


def _is_checkpointing() -> bool:
    """Say whether a graph waits for its backward pass with nothing saved but how to compute it again."""
    placeholder = getattr(sys.modules.get("torch.utils.checkpoint"), "_Holder", None)
    return any(map(partial(is_, placeholder), map(type, gc.get_objects())))
