"""The first operation in a loss's autograd graph whose result is not finite, by the tensors that the graph saves for it.

It has no lines and not all operands. It knows the step that failed, also where the step after it computes something else.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import replace
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.training.profiler.analysis.health.operations import FailedOperation
from nbguard.training.profiler.nonfinite.operations.culprit import facts_of
from nbguard.training.profiler.nonfinite.operations.replay import is_finite

_MOST = 2000
"""Operations of a graph that are examined."""
_NAME = re.compile(r"(\w+?)Backward\d*")
_OPERANDS = ("_saved_self", "_saved_other", "_saved_exponent")
_SCALED = ("mul", "div")
"""Operations whose result is not finite where a number is not, whatever it is multiplied with: most others may leave it out."""
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
