"""The origin of the first value that is not finite, looked for once, in the batch of its detection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

from nbguard.memory.scan.heap.kinds import attributes_of, mro_of, name_of
from nbguard.memory.scan.parked import name_in_model
from nbguard.training.profiler.analysis.nonfinite import Origin
from nbguard.training.profiler.analysis.operations import Float32Trial
from nbguard.training.profiler.nonfinite.float32_layers import tried_in_float32
from nbguard.training.profiler.nonfinite.operations.culprit import items_of, operation_of
from nbguard.training.profiler.nonfinite.operations.operation_trace import StepTrace, module_name
from nbguard.training.profiler.nonfinite.operations.replay import Allowance, FoundOperation, StepReplay, is_finite
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, ModuleCounters, NotPossibleError, rerun

_DEEPEST = 3
"""Greatest depth of dataclasses in dataclasses that is examined."""


def origin_of_loss(torch: Any, calls: Iterable[ForwardCall], counters: ModuleCounters, *, is_first: bool = False) -> Origin:
    """Return the origin of a loss that is not finite, in the models called for it. They stay as they are.

    `is_first`: no loss of this fit was finite before.
    """
    models = [(call, module) for call in calls if (module := call.module()) is not None]
    note = "" if models else "no model was called in this batch"
    for _, module in models:
        name = _last(module, lambda parameter: not is_finite(parameter))
        if name:
            return Origin(kind="weights" if is_first else "step", name=name, type="parameter", root=name_of(type(module)))
    for call, module in models:
        try:
            origin = _search(torch, module, call, counters, is_first=not note)
        except NotPossibleError as error:
            note = str(error)
        else:
            if origin is not None:
                return replace(origin, trial=_tried(torch, module, call, origin, counters))
    return Origin(kind="unknown", note=note) if note else Origin(kind="loss", root=name_of(type(models[-1][1])))


def _tried(torch: Any, module: Any, call: ForwardCall, origin: Origin, counters: ModuleCounters) -> Float32Trial | None:
    return tried_in_float32(torch, module, call, origin, lambda: _search(torch, module, call, counters))


def origin_of_gradient(models: Iterable[Any], broken: set[int]) -> Origin:
    """Return the last parameter in forward order, the first in the backward pass, of those in `broken` (ids)."""
    for module in models:
        name = _last(module, lambda parameter: id(parameter) in broken)
        if name:
            return Origin(kind="gradient", name=name, type="parameter", root=name_of(type(module)))
    return Origin(kind="gradient", type="parameter without a model")


def origin_of_backward(
    torch: Any, calls: Iterable[ForwardCall], counters: ModuleCounters, allowance: Allowance
) -> Origin | None:
    """Return the operation of a model whose backward pass is not finite, whatever the loss, or None if in no model.

    The forward pass runs again, as it does for a loss that is not finite.
    """
    for call in calls:
        module = call.module()
        with contextlib.suppress(NotPossibleError):
            found = None if module is None or allowance.is_used_up else _backward(torch, module, call, counters, allowance)
            if found is not None:
                return origin_of(found, [module])
    return None


def _backward(
    torch: Any, module: Any, call: ForwardCall, counters: ModuleCounters, allowance: Allowance
) -> FoundOperation | None:
    trace = StepTrace()
    output = rerun(torch, module, call, call.inputs(), trace.running, partial(counters.put_back, module), has_grad=True)
    slots = [slot for tensor in _tensors(torch, output) if tensor.requires_grad and (slot := trace.slot_of(tensor)) is not None]
    del output
    replay = StepReplay(trace.program, {}, allowance=allowance)
    return replay.find((*slots,), is_loss=False) if slots else None


def _last(module: Any, is_meant: Any) -> str:
    names = [name for name, parameter in module.named_parameters() if is_meant(parameter)]
    return name_in_model(names[-1]) if names else ""


def _search(torch: Any, module: Any, call: ForwardCall, counters: ModuleCounters, *, is_first: bool = True) -> Origin | None:
    """Return the first operation of a forward pass, run again, whose result is not finite; None where the output is.

    A mask's infinity is gone after the softmax: it is looked for from the output back. `is_first`: no call before it may have
    made its inputs.
    """
    inputs, root = call.inputs(), name_of(type(module))
    broken = _broken(torch, inputs)
    if broken and not (is_first and broken[0].grad_fn is None):
        raise NotPossibleError("its input came so from code before it")
    if broken:
        return Origin(kind="input", root=root, items=items_of(broken[0]))
    trace = StepTrace()
    output = rerun(torch, module, call, inputs, trace.running, lambda: counters.put_back(module))
    broken = _broken(torch, output)
    if not broken:
        return None
    results = tuple(slot for tensor in broken if (slot := trace.slot_of(tensor)) is not None)
    found = StepReplay(trace.program, {}).find(results) if results else None
    if found is None or found.call is None:
        return Origin(kind="code", type=root, root=root)
    return origin_of(found, [module])


def origin_of(found: FoundOperation, models: list[Any]) -> Origin:
    """Return the origin that an operation is. One that no module of the models has called is the loss function's."""
    operation = operation_of(found, models)
    root = name_of(type(models[-1])) if models else ""
    if operation.is_backward or found.of_gradient:
        return Origin(kind="gradient", type="parameter", root=root, operation=operation)
    module = None if found.call is None or found.call.line.module is None else found.call.line.module()
    named = None if module is None else module_name(models, module)
    if module is None or named is None:
        return Origin(kind="loss", root=root, operation=operation)
    name, kind, root = named
    is_leaf = not any(True for _ in module.children())
    return Origin(kind="layer" if is_leaf else "code", name=name, type=kind, root=root, operation=operation)


def _broken(torch: Any, values: Any) -> list[Any]:
    return [tensor for tensor in _tensors(torch, values) if not is_finite(tensor)]


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
