"""The present state of the device, the start of a prediction. Reading it opens no context and waits for nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.replay.rollback import InitialState
from nbguard.memory.allocator.replay.start import StartCorrections, set_up
from nbguard.memory.core.facts import DeviceFacts
from nbguard.memory.room.search import live_state
from nbguard.memory.scan.devices.cuda import device_facts, tracked_device
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts, gpu_named


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """A CUDA device that this process uses, at one moment."""

    gpu: Gpu  # its context is all that is not PyTorch's allocator's: CUDA's own, and other processes' memory
    state: InitialState  # segments and blocks
    own: frozenset[int]  # addresses of blocks that the fit uses again, or makes again in their place
    workspaces: WorkspaceCounts  # that are there already

    def set_up(self, model: CachingAllocator) -> None:
        """Put an empty model into the state of the device, without the fit's own memory."""
        set_up(model, self.state, StartCorrections())
        for address in self.own & model.live.keys():
            model.free(address)
        model.peak_allocated, model.peak_reserved = model.allocated, model.reserved
        model.events.clear()


def live_device(tensors: Iterable[Any], freed: frozenset[int] = frozenset()) -> LiveDevice | None:
    """Return the device on which a fit would run now; None where this process uses none.

    Args:
        tensors: the fit's own: parameters, gradients, the optimizer's state.
        freed: addresses of further blocks to take for free.
    """
    torch: Any = sys.modules["torch"]
    if tracked_device() != "cuda" or not torch.cuda.is_initialized():
        return None
    on_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    index = on_device[0].device.index if on_device else torch.cuda.current_device()
    facts = next((each for each in device_facts("cuda")[0] if each.device == f"cuda:{index}"), None)
    if facts is None or not facts.has_context or facts.free is None or facts.total is None or facts.allocator is None:
        return None
    own = frozenset(tensor.untyped_storage().data_ptr() for tensor in on_device if tensor.device.index == index)
    return LiveDevice(
        gpu=_gpu(torch, index, facts), state=live_state(facts), own=own | freed, workspaces=_workspaces(facts, own)
    )


def unopened_gpu() -> Gpu | None:
    """Return the GPU that a fit would open, with the bytes that others hold of it, or None if none or open already.

    Asks the driver: to ask CUDA would open it.
    """
    facts = next(iter(device_facts("cuda")[0]), None) if tracked_device() == "cuda" else None
    if facts is None or facts.has_context or facts.total is None or facts.free is None:
        return None
    gpu, others = gpu_named(facts.name), facts.total - facts.free
    with NvmlReader() as driver:
        architectures = dict(told[2] if (told := driver.driver()) else ())
    return replace(
        gpu,
        name=f"{facts.device} ({facts.name})",
        capacity=facts.total,
        context=gpu.context + others,
        others=others,
        architecture=architectures.get(facts.name, gpu.architecture),
    )


def _gpu(torch: Any, index: int, facts: DeviceFacts) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    total, free = facts.total or 0, facts.free or 0
    reserved = 0 if facts.allocator is None else facts.allocator.reserved
    limit = total if facts.limit is None else min(total, facts.limit)
    return Gpu(
        name=f"{facts.device} ({facts.name})",
        capacity=limit,
        context=max(0, limit - free - reserved),
        multiprocessors=int(properties.multi_processor_count),
        threads=int(getattr(properties, "max_threads_per_multi_processor", 2048)),
        architecture=(int(properties.major), int(properties.minor)),
    )


def _workspaces(facts: DeviceFacts, own: frozenset[int]) -> WorkspaceCounts:
    """Return the numbers of blocks that are as large as a workspace of cuBLAS or cuBLASLt and no tensor of the fit's."""
    others = (block for segment in facts.segments or () for block in segment.blocks if block.address not in own)
    sizes = Counter(block.requested for block in others if block.requested)
    cublas, cublaslt = (min(2, sizes[nbytes or 0]) for nbytes in (facts.workspace, facts.lt_workspace))
    return WorkspaceCounts(cublas, min(cublas, cublaslt))
