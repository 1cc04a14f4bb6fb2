"""Gives back memory that torch and its libraries keep: the allocator's cache, workspaces, pinned host memory."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.core.facts import PoolId
from nbguard.memory.core.requests import with_free_segments
from nbguard.memory.scan.devices.cuda import segments_by_device
from nbguard.memory.scan.devices.kept_memory import pinned_facts, remember_left_pools
from nbguard.memory.scan.parked import unseen_by_modes


@dataclass
class FreedBytes:
    """Bytes that steps of a cleanup gave back beside the storages that its plan counts, added up step by step."""

    device: int = 0  # workspaces of libraries, by the allocator's counter
    host: int = 0  # memory of ended workers and unused pinned memory


def empty_cache() -> None:
    """Give the allocator's free segments back to the device, on whichever accelerator is in use."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif getattr(torch, "accelerator", None) is not None and torch.accelerator.is_available():
        module: Any = getattr(torch, str(torch.accelerator.current_accelerator().type), None)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def forget_failed_backward() -> None:
    """Free the graph that PyTorch keeps of a backward pass that failed on the CPU.

    The nodes that were to come stay in this thread's queue until another backward pass begins. No profile and no simulated
    device sees this one.
    """
    torch: Any = sys.modules["torch"]
    with suppress(Exception), unseen_by_modes(), torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        leaf, one = torch.zeros((), requires_grad=True, device="cpu"), torch.ones((), device="cpu")
        torch.autograd.Variable._execution_engine.run_backward(
            (leaf,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def note_left_pools(unkept: Collection[PoolId]) -> None:
    """Remember which of the private pools `unkept` have free segments though the cache has just been emptied.

    Nothing known keeps these pools, and they give nothing back: a capture that failed left them in use for good.
    """
    segments = chain.from_iterable(segments_by_device().values()) if unkept else ()
    remember_left_pools(with_free_segments(segments, unkept))


def clear_workspaces(freed: FreedBytes) -> None:
    """Clear the workspaces that torch keeps for cuBLAS, which makes them again; their bytes are added to `freed`."""
    torch: Any = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        raise NbguardError("this torch has no way to clear them")
    before = _allocated(torch)
    torch._C._cuda_clearCublasWorkspaces()
    freed.device += before - _allocated(torch)


def _allocated(torch: Any) -> int:
    return sum(int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count()))


def return_pinned_memory(freed: FreedBytes) -> None:
    """Give the pinned host memory that nothing uses back to the system; their bytes are added to `freed`."""
    torch: Any = sys.modules["torch"]
    before = pinned_facts()
    if before is None:
        return
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    elif hasattr(torch._C, "_accelerator_emptyHostCache"):
        torch._C._accelerator_emptyHostCache()
    else:
        raise NbguardError("this torch has no way to give it back (torch 2.5 has one)")
    after = pinned_facts()
    freed.host += before.reserved - (0 if after is None else after.reserved)
