"""Record one workload: `python -m tests.gpu.record NAME FILE [--dry]`, in a process that does nothing else.

History is on before the first allocation, so that a model of the allocator can replay the process from its start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu import device
from tests.gpu.recording import SCHEMA, Json, dump, packed
from tests.gpu.workloads import WORKLOADS

_MAX_ENTRIES = 100_000


def record(name: str, *, dry: bool) -> Json:
    """Run the workload `name` and return its recording."""
    workload = WORKLOADS[name]
    before_context = driver_bytes()
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python")
    free, total = torch.cuda.mem_get_info()
    context = {"mem_get_info": [free, total], "nvml_before": before_context, "nvml": driver_bytes()}
    fraction = None if workload.cap is None else min(1.0, workload.cap / total)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    kept, words = workload.run()
    recording: Json = {
        "schema": SCHEMA,
        "name": name,
        "dry": dry,
        "what": words,
        "device": device.look(),
        "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "memory_fraction": fraction,
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "cublas_workspace_size": getattr(torch._C, "_cuda_getCublasWorkspaceSize", lambda: None)(),
        "pools_in_use": _pools(kept),
        "context": context,
    } | _state()
    torch.cuda.synchronize()
    recording["afterwards"] = _afterwards()
    del kept
    assert len(recording["device_traces"][0]) < _MAX_ENTRIES, "the history is longer than what is kept of it"
    return recording


def _pools(kept: Any) -> list[list[int]]:
    """Return the ids of the private pools that the graphs and pools among `kept` keep in use."""
    found = set()
    for each in kept if type(kept) in (list, tuple) else ():
        if type(each) is torch.cuda.CUDAGraph:
            found.add(tuple(each.pool()))
        elif type(each) is getattr(torch.cuda, "MemPool", None):
            found.add(tuple(each.id))
    return sorted(map(list, found))


def _state() -> Json:
    """Return what torch and the driver say now. The snapshot comes first: nothing may happen between it and the counters."""
    snapshot = torch.cuda.memory._snapshot()
    stats = dict(torch.cuda.memory_stats())
    host_stats = getattr(torch.cuda, "host_memory_stats", None)
    return {
        "memory_stats": stats,
        "host_memory_stats": None if host_stats is None else dict(host_stats()),
        "mem_get_info": list(torch.cuda.mem_get_info()),
        "nvml": driver_bytes(),
    } | packed(snapshot)


def _afterwards() -> Json:
    """Return by trying how much an empty cache gives back, and how much of the rest is cuBLAS's workspaces."""
    torch.cuda.memory._record_memory_history(enabled=None)
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    after, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return {"empty_cache": [reserved, after], "cublas_workspaces": allocated - torch.cuda.memory_allocated()}


def driver_bytes() -> Json | None:
    """Return the driver's view in bytes: total, used, this process's own, and how many others; None where it has no say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(_physical_index())
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception:
        return None
    found: dict[str, Any] = {"total": int(memory.total), "used": int(memory.used), "own": None, "others": None}
    try:
        processes = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return found
    own = processes.pop(os.getpid(), None)
    return found | {"own": own, "others": len(processes)}


def _physical_index() -> int:
    """Return the driver's number of torch's device 0."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return int(first) if first.isdigit() else 0


def main(arguments: list[str]) -> None:
    """Write the recording of one workload to a file and say its size."""
    name, file, *flags = arguments
    recording = record(name, dry="--dry" in flags)
    size = dump(recording, Path(file))
    print(f"{len(recording['device_traces'][0])} events, {size // 1000} kB: {recording['what']}", flush=True)
    os._exit(0)  # the file is whole: how threads and the driver part is nobody's concern


if __name__ == "__main__":
    main(sys.argv[1:])
