"""Several ranks that train together: which of them may run a batch again on its own.

A rank that divides its model's call makes the same collectives in the same order as before, so the others only wait a little
longer, and no rank has to agree. That holds where nothing that is repeated has a collective in it. An exchange of a flag could
not save the rest: the other ranks are inside a collective of the batch already, and would never come to it.
"""

from __future__ import annotations

import sys
from typing import Any

_COLLECTIVE = ("c10d", "_c10d_functional")
"""Namespaces of the operations that ranks do together."""
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Classes that gather parameters from other ranks in their calls."""


def is_alone() -> bool:
    """Say whether no other rank trains along."""
    return _group() is None


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")
    if not hasattr(distributed, "is_initialized") or not distributed.is_initialized():  # a build may be without it
        return None
    return distributed if distributed.get_world_size() > 1 else None


def collectives_so_far() -> int:
    """Return a number that each collective of this rank raises; 0 where it is alone."""
    distributed = _group()
    if distributed is None:
        return 0
    return sum(group._get_sequence_number_for_group() for group in distributed.distributed_c10d._world.pg_map)


def without_ddp(model: Any) -> Any:
    """Return the model that a DistributedDataParallel is around, whose own call has no collective; any other as it is."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return model.module if parallel is not None and isinstance(model, parallel.DistributedDataParallel) else model


def sharding(model: Any) -> str:
    """Return why the call of a model needs the other ranks, as far as its layers tell; empty if they don't say so."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    for module in model.modules():
        name = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _SHARDED), "")
        if name or without_ddp(module) is not module:
            return f"`{name or type(module).__name__}` exchanges tensors with the other ranks in each call"
    if tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters()):
        return "its parameters are spread over the ranks"
    return ""


def no_collectives(refused: type[Exception]) -> Any:
    """Return a context that raises before any collective: the other ranks would wait for ever."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoCollectives(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in _COLLECTIVE:
                raise refused(f"it exchanges tensors with the other ranks (`{func.overloadpacket.__name__}`)")
            return func(*args, **(kwargs or {}))

    return NoCollectives()
