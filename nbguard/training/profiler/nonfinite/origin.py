"""The origin of the first value that is not finite, looked for once, in the batch of its detection."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from types import CodeType
from typing import Any

import torch

from nbguard.errors import NbguardError, in_one_line
from nbguard.memory.core.advice import STOP_ON_NAN, repair_nan
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attributes_of, mro_of, name_of
from nbguard.memory.scan.parked import hooks_of, name_in_model
from nbguard.training.profiler.analysis.nonfinite import NanRepair, NotFinite, Origin, line_for
from nbguard.training.profiler.analysis.operations import FailedOperation, Float32Trial
from nbguard.training.profiler.nonfinite.float32_layers import tried_in_float32
from nbguard.training.profiler.nonfinite.operation_replay import Allowance, FoundOperation, StepReplay, is_finite
from nbguard.training.profiler.nonfinite.operation_trace import OperationLine, StepTrace, code_of, function_name, module_name
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, ModuleCounters, NotPossibleError, rerun
from nbguard.training.profiler.nonfinite.source_lines import RecordedStep, operations_at, operations_in
from nbguard.training.profiler.record.model_calls import CallArguments

# --- The operation that made a value that is not finite, found in the loss's graph, with the numbers that it got


# --- The operation of a hook or of code before the step that alone can have made a gradient not finite which else would be.


_Site = tuple[str, str]
"""The name of an operation, and its line in words."""


def gradient_hooks_of(parameter: Any) -> Iterator[CodeType]:
    """Yield the code of the hooks of a parameter that see its gradient."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        for hook in [*(getattr(parameter, kind, None) or {}).values()]:
            code = code_of(hook)
            if code is not None:
                yield code


def operation_of_hooks(parameters: Iterable[Any]) -> FailedOperation | None:
    """Return the only such operation in hooks of parameters; None where one of them has none."""
    hooks = [[*gradient_hooks_of(parameter)] for parameter in parameters]
    return only_operation({code for codes in hooks for code in codes}) if hooks and all(hooks) else None


def only_operation(codes: Iterable[CodeType]) -> FailedOperation | None:
    """Return the only operation in functions of the user's that can make a value which is not finite of usual ones."""
    sites = Sites()
    return _only(
        (name, OperationLine(code.co_filename, number, function_name(code)).words)
        for code in codes
        if sites.is_users(code.co_filename)
        for name, number in operations_in(code)
    )


def only_change(step: RecordedStep) -> FailedOperation | None:
    """Return the only such operation in the user's code between the backward pass and the step that has led to a gradient."""
    makers = {slot: call for call in step.program.calls[step.until :] for slot in call.makes}
    waiting = [last for before, last in step.gradients.values() if last != before]
    seen: set[int] = set()
    found: list[_Site] = []
    while waiting:
        slot = waiting.pop()
        call = makers.get(slot)
        if slot in seen or call is None:
            continue
        seen.add(slot)
        waiting.extend(call.reads)
        if call.name in operations_at(call.line.file, call.line.number):  # it is not a library's
            found.append((call.name, call.line.words))
    return _only(found)


def _only(sites: Iterable[_Site]) -> FailedOperation | None:
    every = dict.fromkeys(sites)
    able = [site for site in every if FailedOperation(name=site[0]).is_singular] or list(every)
    return FailedOperation(name=able[0][0], line=able[0][1]) if len(able) == 1 else None


_ITEMS = 4
"""Places in a batch that are named."""


def operation_of(found: FoundOperation, models: list[Any]) -> FailedOperation:
    """Return the facts of an operation, from the values that it was computed with again."""
    call = found.call
    if call is None:
        raise ValueError("no operation made it")
    gradient = found.gradient[0] if found.gradient else None
    is_turned = call.function.__name__ in ("__rtruediv__", "__rpow__", "__rdiv__")
    operation = facts_of(call.name, found.values, found.made, is_turned=is_turned, gradient=gradient)
    module = call.line.module() if call.line.module is not None else None
    named = None if module is None else module_name(models, module)
    return replace(
        operation,
        line=call.line.words,
        module=named[0] if named else "",
        module_type=named[1] if named else "",
        is_backward=found.gradient is not None,
        has_only_minus_infinity=found.gradient is None and operation.has_only_minus_infinity,
    )


def facts_of(name: str, operands: Any, results: list[Any], *, is_turned: bool = False, gradient: Any = None) -> FailedOperation:
    """Return the facts of an operation.

    `results`: of the operation, or the gradients of its inputs. `is_turned`: the first operand stands last, as in `1 / x`.
    `gradient`: of its result.
    """
    leaves = torch.utils._pytree.tree_leaves(operands)
    tensors = [leaf for leaf in leaves if torch.Tensor in mro_of(type(leaf))]
    numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
    made = next((tensor for tensor in results if not _all_finite(tensor)), results[0])
    is_broken = ~torch.isfinite(made.detach())
    place = tuple(is_broken.nonzero()[0].tolist()) if made.numel() and bool(is_broken.any()) else ()
    got = [_at(tensor, made, place) for tensor in tensors]
    value, other = next(iter(got), None), next(iter(got[1:]), None)
    if other is None and numbers and len(tensors) == 1:
        other = float(numbers[0])
        value, other = (other, value) if is_turned else (value, other)
    return FailedOperation(
        name=name,
        result="NaN" if bool(made.isnan().any()) else "infinite",
        dtype=str(_narrowest([*tensors, made])).removeprefix("torch."),
        value=value,
        other=other,
        largest=max((size for tensor in tensors if (size := _largest(tensor)) is not None), default=None),
        is_empty=any(tensor.numel() == 0 for tensor in tensors),
        has_only_minus_infinity=any(not _all_finite(tensor) for tensor in tensors),
        is_masked=_at(gradient, made, place) == 0.0,
    )


def items_of(tensor: Any) -> tuple[int, ...]:
    """Return the first places in a batch whose values are not finite."""
    if not tensor.dim():
        return ()
    is_broken = ~torch.isfinite(tensor.detach()).reshape(tensor.shape[0], -1).all(1)
    return tuple(is_broken.nonzero()[:_ITEMS, 0].tolist())


def _at(tensor: Any, made: Any, place: tuple[int, ...]) -> float | None:
    """Return the value of a tensor where `made` has one at `place`, if one goes with the other; the only one of another."""
    if tensor is None or not tensor.numel() or tensor.is_complex():
        return None
    tensor = tensor.detach()
    if tensor.numel() == 1:
        return float(tensor.reshape(()))
    if tensor.shape == made.shape:
        return float(tensor[place])
    try:
        return float(tensor.expand(made.shape)[place])
    except RuntimeError:
        return None


def _largest(tensor: Any) -> float | None:
    if not tensor.numel() or not tensor.is_floating_point():
        return None
    size = float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
    return size if math.isfinite(size) else None


def _narrowest(tensors: list[Any]) -> Any:
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return next((dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)), dtypes[-1] if dtypes else "")


def _all_finite(tensor: Any) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


# --- The first operation in a loss's autograd graph whose result is not finite, by the tensors that the graph saves for it.
#
# It has no lines and not all operands. It knows the step that failed, also where the step after it computes something else.


_MOST = 2000
"""Operations of a graph that are examined."""
_NAME = re.compile(r"(\w+?)Backward\d*")
_OPERANDS = ("_saved_self", "_saved_other", "_saved_exponent")
_SCALED = ("mul", "div")
"""Operations whose result is not finite where a number is not, whatever it is multiplied with. Most others may leave it out."""
_MEAN = 1
"""The number of a mean among the reductions of a loss."""
_OPTIONS = ("dim", "correction", "keepdim")


def operation_in_graph(loss: Any) -> tuple[FailedOperation, bool] | None:
    """Return the operation, and whether the graph has no other of its kind.

    None where the graph has saved too little of it, or is too large.
    """
    nodes, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting.append(node)
        if len(nodes) > _MOST:
            return None
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        match = _NAME.fullmatch(name_of(type(node)))
        operation = None if match is None else _failed_at(match[1].lower(), node)
        if operation is not None:
            return operation, sum(type(other) is type(node) for other in nodes) == 1
    return None


def _failed_at(name: str, node: Any) -> FailedOperation | None:
    """Return an operation whose operands are finite, as far as they are saved, and whose result is not."""
    if name == "nllloss" and _counts_nothing(node):
        return FailedOperation(name="cross_entropy")
    operands = [value for saved in _OPERANDS if (value := getattr(node, saved, None)) is not None]
    tensors = [value for value in operands if torch.Tensor in mro_of(type(value))]
    broken = [value for value in tensors if not is_finite(value)]
    if broken:
        is_number = name in _SCALED and not any(value.dim() or value.requires_grad for value in broken)
        return replace(facts_of(name, (), broken), value=float(broken[0])) if is_number else None
    result = getattr(node, "_saved_result", None)
    function = getattr(torch, name, None)
    if result is None and tensors and function is not None:
        options = {option: getattr(node, f"_saved_{option}") for option in _OPTIONS if hasattr(node, f"_saved_{option}")}
        is_half = name == "div" and getattr(node, "_saved_self", None) is None
        with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(TypeError, RuntimeError):  # it takes more operands
            warnings.simplefilter("ignore")
            result = function(*([1.0] if is_half else []), *operands, **options)
    if torch.Tensor not in mro_of(type(result)) or is_finite(result):
        return None
    return facts_of(name, operands, [result])


def _counts_nothing(node: Any) -> bool:
    """Say whether this is a mean over targets that are all ignored."""
    total = getattr(node, "_saved_total_weight", None)
    return total is not None and getattr(node, "_saved_reduction", 0) == _MEAN and total.numel() == 1 and not float(total)


# --- origin


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


# --- The last value that was not finite, as a profile met it, and the repair of the model that made it


_last_found: tuple[NotFinite, weakref.ref[Any] | None] | None = None


def keep_first(first: NotFinite, model: Any) -> None:
    """Keep the first value of a fit that was not finite. The model is held weakly, or None if unknown."""
    global _last_found
    _last_found = first, None if model is None else weakref.ref(model)


def last_model() -> Any:
    """Return the model that made the last one; None where it is gone or was not known."""
    return None if _last_found is None or _last_found[1] is None else _last_found[1]()


def nan_repair(model: Any, subject: str) -> NanRepair:
    """Return the repair of the last value that was not finite.

    Args:
        model: the one that is to be repaired, or None for the one that made the value.
        subject: it or its Learner, as the notebook writes it; empty where it has no name.

    Raises:
        NbguardError: no profile met such a value, or it was another model's.
    """
    if _last_found is None:
        raise NbguardError(
            "no profile has seen a NaN yet: profile the fit with  "
            + STOP_ON_NAN.command
            + "  and try again, or give a batch, as in  "
            + repair_nan("learn", "--batch xb").command
        )
    first, made_by = _last_found
    if model is not None and made_by is not None and made_by() is not None and made_by() is not model:
        raise NbguardError("the last NaN was made by another model: profile a fit of this one with  " + STOP_ON_NAN.command)
    if first.origin.kind == "unknown":
        raise NbguardError(
            f"the layer is not known ({first.origin.note}): profile the fit with  " + STOP_ON_NAN.command + "  and try again"
        )
    return repair_of(first.origin, f"The {first.of} was {first.value} in {first.place.words}", subject)


def repair_of(origin: Origin, met: str, subject: str) -> NanRepair:
    """Return the repair that follows from the origin of a value."""
    trial = origin.trial
    layers = trial.layers if trial is not None and trial.is_finite else ()
    return NanRepair(subject=subject, met=met, origin=origin, layers=layers, line=line_for(subject, layers))


def origin_on(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Origin:
    """Return the layer of a model that makes a value which is not finite of these inputs, tried in float32.

    The autocast that is on goes for it. The model, its buffers and all generators are as before.

    Raises:
        NbguardError: the model cannot be run on them, or returns finite values.
    """
    import torch

    from nbguard.training.profiler.nonfinite.rerun import ModuleCounters, autocast_of, device_type

    arguments = CallArguments.of(inputs, named)
    autocast = autocast_of(torch, device_type(torch, arguments))
    call = ForwardCall(weakref.ref(model), tuple(arguments), autocast, arguments.names)
    origin = origin_of_loss(torch, [call], ModuleCounters())
    if origin.kind == "unknown":
        raise NbguardError(f"the model cannot be tried: {origin.note}")
    if origin.kind == "loss":
        raise NbguardError("the model returns finite values for this batch: give the one that failed")
    return origin


def finite_copy(model: Any, layers: tuple[str, ...]) -> Any:
    """Return a copy of a model whose named layers compute in float32. Parameters and buffers are the model's own.

    Raises:
        NbguardError: something in the model cannot be copied.
    """
    from nbguard.training.profiler.nonfinite.float32_layers import in_float32

    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for hooks in [hooks for module in model.modules() for hooks in hooks_of(module)]:
        memo[id(hooks)] = type(hooks)()  # a hook may lead to a Learner, and all that this holds
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        reason = in_one_line(error)
        raise NbguardError(
            f"the model cannot be copied ({reason}): run the command without -o for the line to paste"
        ) from error
    in_float32(copied, *layers)
    return copied
