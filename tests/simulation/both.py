"""Runs a program on the fake CUDA device and in the simulation, and compares what both allocators did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import nbguard

MIB = 2**20

_PRELUDE = """
import gc, torch
marks, failed, DEV = [], [], "cuda"
{workspaces}
torch.cuda.memory._record_memory_history(stacks="python")
start = torch.cuda.memory_allocated()
def check():
    found = torch.cuda.memory_stats()
    marks.append([found[f"{{kind}}_bytes.all.{{when}}"] for kind in ("allocated", "reserved") for when in ("current", "peak")])
"""
_REPORT = """
import json
trace = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] != "snapshot"]
segments = [[s["total_size"], [[b["size"], b["state"]] for b in s["blocks"]]] for s in torch.cuda.memory_snapshot()]
print(json.dumps([marks, failed, [[e["action"], e["size"]] for e in trace], segments]))
"""


@dataclass
class Ran:
    """What an allocator did: figures at each check, failed turns, (action, bytes) of each event, segments with blocks."""

    marks: list[list[int]]
    failed: list[int]
    events: list[list[Any]]
    segments: list[Any]


def on_cuda(run: Callable[..., str], program: str, capacity: int, conf: str = "") -> Ran:
    """Run a program on PyTorch's own allocator; cuBLAS has no workspaces."""
    code = _PRELUDE.format(workspaces="") + program + _REPORT
    out = run(code, conf=conf, bytes=capacity, context=0, CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")
    return Ran(*json.loads(out.splitlines()[-1]))


def simulated(program: str, capacity: int, conf: str = "") -> Ran:
    """Run a program on the CPU in the simulation."""
    sim = nbguard.simulate(capacity, conf, record=True)
    marks: list[list[int]] = []
    names: dict[str, Any] = {"torch": torch, "DEV": "cpu", "failed": []}

    def check() -> None:
        found = sim.figures()
        marks.append([found.allocated, found.peak_allocated, found.reserved, found.peak_reserved])

    names["check"] = check
    with sim:
        exec(program, names)
    events = [[action, size] for action, _, size, _ in sim.events()]
    segments = [[s["total_size"], [[b["size"], b["state"]] for b in s["blocks"]]] for s in sim.segments()]
    return Ran(marks, names["failed"], events, segments)
