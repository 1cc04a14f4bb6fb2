"""The origin of the first value that is not finite, looked for once, in the batch in which it was met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any

from nbguard.profiler.analysis.health.float32 import Float32Trial
from nbguard.profiler.analysis.health.nonfinite import Origin
from nbguard.profiler.instruments.nonfinite.float32_layers import name_in_model
from nbguard.profiler.instruments.nonfinite.float32_trial import tried_in_float32
from nbguard.profiler.instruments.nonfinite.module_counters import ModuleCounters
from nbguard.profiler.instruments.nonfinite.rerun import ForwardCall, NotPossibleError, rerun
from nbguard.scan.heap.attributes import attributes_of
from nbguard.scan.heap.kinds import mro_of, name_of

_ITEMS = 4
"""Places in a batch that are named."""
_DEEPEST = 3
"""Dataclasses in dataclasses that are looked into."""


def origin_of_loss(torch: Any, calls: Iterable[ForwardCall], counters: ModuleCounters) -> Origin:
    """Return the origin of a loss that is not finite, in the models called for it. They stay as they are."""
    models = [(call, module) for call in calls if (module := call.module()) is not None]
    note = "" if models else "no model was called in this batch"
    for _, module in models:
        name = _last(module, lambda parameter: not is_finite(torch, parameter))
        if name:
            return Origin(kind="step", name=name, type="parameter", root=name_of(type(module)))
    for call, module in models:
        try:
            origin = _Search(torch, module).run(call, counters)
        except NotPossibleError as error:
            note = str(error)
        else:
            if origin is not None:
                return replace(origin, trial=_tried(torch, module, call, origin, counters))
    return Origin(kind="unknown", note=note) if note else Origin(kind="loss", root=name_of(type(models[-1][1])))


def _tried(torch: Any, module: Any, call: ForwardCall, origin: Origin, counters: ModuleCounters) -> Float32Trial | None:
    return tried_in_float32(torch, module, call, origin, lambda: _Search(torch, module).run(call, counters))


def origin_of_gradient(models: Iterable[Any], broken: set[int]) -> Origin:
    """Return the last parameter in forward order, the first in the backward pass, of those in `broken` (ids)."""
    for module in models:
        name = _last(module, lambda parameter: id(parameter) in broken)
        if name:
            return Origin(kind="gradient", name=name, type="parameter", root=name_of(type(module)))
    return Origin(kind="gradient", type="parameter without a model")


def is_finite(torch: Any, tensor: Any) -> bool:
    """Say whether all values are finite; True if it has no floating point values. Waits for the tensor's device."""
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all().tolist())


def _last(module: Any, is_meant: Any) -> str:
    names = [name for name, parameter in module.named_parameters() if is_meant(parameter)]
    return name_in_model(names[-1]) if names else ""


class _Search:
    """One forward pass again, and the first module in it whose output is not finite and stays so.

    A mask's infinity is gone after the softmax: a module that gets it and returns finite values, or the end of one around
    the mask, clears it.
    """

    def __init__(self, torch: Any, module: Any) -> None:
        self._torch = torch
        self._module = module
        self._names = {id(submodule): name for name, submodule in module.named_modules()}
        self._suspect: Origin | None = None

    def run(self, call: ForwardCall, counters: ModuleCounters) -> Origin | None:
        inputs = call.inputs()
        if not self._are_finite(inputs):
            return Origin(kind="input", root=name_of(type(self._module)), items=self._items(inputs))
        output = rerun(self._torch, self._module, call, inputs, self._hook, lambda: counters.put_back(self._module))
        if self._suspect is None and not self._are_finite(output):
            return self._origin("code", self._module)
        return self._suspect

    def _hook(self, module: Any, args: Any, named: Any, output: Any) -> None:
        if self._are_finite(output):
            if self._suspect is not None and self._clears(self._suspect, module, (args, named)):
                self._suspect = None
            return
        if self._suspect is not None:
            return
        if any(True for _ in module.children()):
            self._suspect = self._origin("code", module)
        elif self._are_finite((args, named)):
            self._suspect = self._origin("layer", module)
        else:
            self._suspect = self._origin("code", self._parent(module))

    def _clears(self, suspect: Origin, module: Any, inputs: Any) -> bool:
        """Say whether a module with finite output is the one around the suspect, or got values that are not finite."""
        name = name_in_model(self._names.get(id(module), ""))
        return f"{suspect.name}.".startswith(f"{name}." if name else "") or not self._are_finite(inputs)

    def _origin(self, kind: Any, module: Any) -> Origin:
        name = name_in_model(self._names.get(id(module), ""))
        return Origin(kind=kind, name=name, type=name_of(type(module)), root=name_of(type(self._module)))

    def _parent(self, module: Any) -> Any:
        name = self._names.get(id(module), "").rpartition(".")[0]
        return next((submodule for path, submodule in self._module.named_modules() if path == name), self._module)

    def _items(self, inputs: Any) -> tuple[int, ...]:
        """Return the first places in the batch whose values are not finite."""
        torch = self._torch
        for tensor in _tensors(torch, inputs):
            if tensor.dim() and not is_finite(torch, tensor):
                is_broken = ~torch.isfinite(tensor.detach()).reshape(tensor.shape[0], -1).all(1)
                return tuple(is_broken.nonzero()[:_ITEMS, 0].tolist())
        return ()

    def _are_finite(self, values: Any) -> bool:
        return all(is_finite(self._torch, tensor) for tensor in _tensors(self._torch, values))


def _tensors(torch: Any, values: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield the tensors in a module's inputs or output: in containers, dataclasses and mappings like transformers' outputs."""
    for leaf in torch.utils._pytree.tree_leaves(values):
        mro = mro_of(type(leaf))
        if torch.Tensor in mro:
            yield leaf
        elif depth and dict in mro:
            yield from _tensors(torch, [*dict.values(leaf)], depth - 1)
        elif depth and is_dataclass(type(leaf)):
            yield from _tensors(torch, [*(attributes_of(leaf) or {}).values()], depth - 1)
