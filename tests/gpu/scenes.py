"""Situations on a GPU, and what nbguard, torch and the driver say of each. Every function runs in a process of its own.

They return plain numbers; `test_truth.py` says what must hold between them.
"""

from __future__ import annotations

import gc
import pkgutil
from typing import Any

import torch

import nbguard
from tests.gpu import states
from tests.gpu.record import driver_bytes

Json = dict[str, Any]
MIB = 1024**2


def reported(state: str) -> Json:
    """Return what is said of one of the `states`, and what an empty cache then gives back."""
    kept, _ = pkgutil.resolve_name(f"tests.gpu.states:{state}")()
    said = _said({"kept": kept})
    before = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    given_back = before - torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return said | {
        "is_let_go": state == "pool_left",
        "given_back": given_back,
        "workspaces": allocated - torch.cuda.memory_allocated(),
    }


def _said(names: Json) -> Json:
    free_before, total = torch.cuda.mem_get_info()
    device = nbguard.report(names).devices[0]
    stats = torch.cuda.memory_stats()
    private = [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return {
        "parts": {part.name: part.nbytes for part in device.parts},
        "total": [device.total, total],
        "free": [free_before, torch.cuda.mem_get_info()[0]],
        "pools": sum(pool.space.reserved for pool in device.pools),
        "holders": {holder.label: holder.retained for holder in device.holders},
        "allocated": stats["allocated_bytes.all.current"],
        "active": stats["active_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "private": sum(segment["total_size"] for segment in private),
    }


def looking_before_cuda() -> Json:
    """Look before anything has used the GPU."""
    before = driver_bytes()
    report = nbguard.report({"x": torch.ones(3)})
    return {
        "said": [each.reason for each in report.unavailable],
        "initialized": torch.cuda.is_initialized(),
        "context": torch._C._cuda_hasPrimaryContext(0),
        "used": [reading and reading["used"] for reading in (before, driver_bytes())],
    }


def cleanup(kind: str) -> Json:
    """Free named tensors, or an unreachable cycle, among others that stay."""
    gc.disable()
    names: Json = {"kept": _tensors(7), "runs": {"a": _tensors(40), "b": _tensors(5)}}
    names["also"] = names["runs"]["a"][3]
    if kind == "cycle":
        cycle: list[Any] = [names["runs"]["a"]]
        cycle.append(cycle)
        del names["runs"]["a"], cycle
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    outcome = nbguard.release(*(['runs["a"]'] if kind == "name" else []), namespace=names)
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        "promised": outcome.plan.promised,
        "realised": outcome.realised,
        "extra": outcome.extra,
        "allocated": before[0] - after[0],
        "reserved": [outcome.plan.reserved, before[1] - after[1]],
    }


def _tensors(count: int) -> list[torch.Tensor]:
    """Return tensors of sizes that the allocator rounds, in small and in large segments."""
    return [torch.empty((number % 7 + 1) ** 4 * 1000 + 1, dtype=torch.uint8, device="cuda") for number in range(count)]


def pending() -> Json:
    """Look while a side stream still uses what has been freed, and again when it has ended."""
    nbguard.report({"x": torch.ones(3, device="cuda")})
    (kept, side), _ = states.record_stream()
    during = _said({"kept": kept})
    runs_on = not side.query()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # an allocation is when the allocator looks at its events
    return {"during": during, "runs_on": runs_on, "afterwards": _said({"kept": kept})}


def looking_while_the_gpu_works() -> Json:
    """Look while a long kernel runs. The first look has loaded everything that this one needs."""
    names = {"x": torch.ones(3, device="cuda")}
    nbguard.report(names)
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    torch.cuda._sleep(states.LONG_SLEEP)
    ended.record()
    report = nbguard.report(names)
    return {"runs_on": not ended.query(), "devices": len(report.devices)}
