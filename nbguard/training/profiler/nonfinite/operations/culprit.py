"""The operation that made a value that is not finite, found in the loss's graph, with the numbers that it got."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.training.profiler.analysis.operations import FailedOperation
from nbguard.training.profiler.nonfinite.operations.operation_trace import OperationLine, code_of, function_name, module_name
from nbguard.training.profiler.nonfinite.operations.replay import FoundOperation, is_finite
from nbguard.training.profiler.nonfinite.operations.source_lines import RecordedStep, operations_at, operations_in

# --- The operation of a hook or of code before the step that alone can have made a gradient not finite which else would be.


_Site = tuple[str, str]
"""The name of an operation, and its line in words."""


def hooks_of(parameter: Any) -> Iterator[CodeType]:
    """Yield the code of the hooks of a parameter that see its gradient."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        for hook in [*(getattr(parameter, kind, None) or {}).values()]:
            code = code_of(hook)
            if code is not None:
                yield code


def operation_of_hooks(parameters: Iterable[Any]) -> FailedOperation | None:
    """Return the only such operation in hooks of parameters; None where one of them has none."""
    hooks = [[*hooks_of(parameter)] for parameter in parameters]
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
        operation = None if match is None else _broken(match[1].lower(), node)
        if operation is not None:
            return operation, sum(type(other) is type(node) for other in nodes) == 1
    return None


def _broken(name: str, node: Any) -> FailedOperation | None:
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
