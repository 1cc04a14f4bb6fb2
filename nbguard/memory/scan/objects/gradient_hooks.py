"""Hooks on the end of a parameter's graphs, where its gradient is added up; a move to another device would cut them off.

torch gives a parameter that changes its device a new end. A hook on the former one is not told and never runs again: processes
that train together would drift apart without a word.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.objects.plain_torch import plain_torch

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
