"""The model beside PyTorch's real allocator on the fake device, event by event."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version
from nbguard.memory.allocator.replay.replay import replay
from nbguard.memory.allocator.snapshot.read import load_snapshot
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, parse_snapshot
from tests.allocator.first_fit import FirstFit

MIB = 2**20
CAPACITY = 1200 * MIB

RUN = """
import json, sys, torch
ops, fraction, history = json.loads(OPS), FRACTION, HISTORY
torch.cuda.set_per_process_memory_fraction(fraction) if fraction < 1 else None
free, total = torch.cuda.mem_get_info()
memory = torch.cuda.memory
streams = {0: torch.cuda.default_stream(), **{n: torch.cuda.Stream() for n in (1, 2)}}
handles = {n: stream.cuda_stream for n, stream in streams.items()}
live, done = {}, []
if history:
    memory._record_memory_history(stacks="python")
for op in ops:
    if not history and op[0] == "history":
        memory._record_memory_history(stacks="python")
    if op[0] == "malloc":
        try:
            with torch.cuda.stream(streams[op[3]]):
                live[op[1]] = torch.empty(op[2], dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
    elif op[0] == "free":
        live.pop(op[1], None)
    elif op[0] == "record" and op[1] in live:
        live[op[1]].record_stream(streams[op[2]])
    elif op[0] == "empty":
        torch.cuda.empty_cache()
snapshot = memory._snapshot()
trace = [e for e in snapshot["device_traces"][0] if e["action"] != "snapshot"]
strip = lambda e: {k: v for k, v in e.items() if k != "frames"}
stats = {k: v for k, v in torch.cuda.memory_stats().items() if isinstance(v, int)}
print(json.dumps({"torch": torch.__version__, "handles": handles, "free": free, "total": total, "stats": stats,
    "snapshot": {"segments": [strip(s) | {"blocks": [strip(b) for b in s["blocks"]]} for s in snapshot["segments"]],
    "device_traces": [[strip(e) for e in trace]], "allocator_settings": snapshot["allocator_settings"]}}))
"""


SIZES = (1, 512, 5000, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB, 50 * MIB, 130 * MIB)


def program(seed: int, count: int = 700) -> list[list[object]]:
    """Return calls drawn from a seed."""
    rng = random.Random(seed)
    ops: list[list[object]] = []
    live: list[int] = []
    for name in range(count):
        what = rng.random()
        if name == count // 2:
            ops.append(["history"])
        if what < 0.55 or not live:
            live.append(name)
            ops.append(["malloc", name, int(rng.choice(SIZES) * rng.choice((1, 1, 0.6)) + 1), rng.choice((0, 0, 1, 2))])
        elif what < 0.96:
            ops.append(["free", live.pop(rng.randrange(len(live)))])
        elif what < 0.98:
            ops.append(["record", rng.choice(live), rng.choice((0, 1, 2))])
        else:
            ops.append(["empty"])
    return ops


CASES = [
    ("", 1.0),
    ("expandable_segments:True", 1.0),
    ("max_split_size_mb:24", 1.0),
    ("garbage_collection_threshold:0.4", 0.8),
    ("roundup_power2_divisions:[1:8,16:2,>:4]", 1.0),
    ("expandable_segments:True,max_split_size_mb:32", 0.9),
    ("large_segment_size_mb:40,max_split_size_mb:64,max_non_split_rounding_mb:48,garbage_collection_threshold:0.5", 0.7),
]


@pytest.mark.parametrize(("conf", "fraction"), CASES, ids=[conf.replace(",", " ")[:40] or "defaults" for conf, _ in CASES])
def test_the_model_does_what_the_binary_does(conf: str, fraction: float, fake_cuda_run: Callable[..., str]) -> None:
    ops = program(seed=len(conf))
    real = _run(fake_cuda_run, ops, conf, fraction, history=True)
    trace = [_plain(event) for event in real["snapshot"]["device_traces"][0]]
    assert sum(event[0] == "alloc" for event in trace) > 300

    model = _model(real, ops, conf, fraction)

    assert model.events == trace
    assert [_segment(segment) for segment in model.segments()] == [_segment(each) for each in real["snapshot"]["segments"]]
    assert {name: real["stats"][name] for name in model.stats()} == model.stats()


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_trace_of_the_binary_replays_from_the_middle(conf: str, fake_cuda_run: Callable[..., str]) -> None:
    real = _run(fake_cuda_run, program(seed=3), conf, 1.0, history=False)

    facts = Sidecar(torch_version=real["torch"], settings=None, totals=(real["total"],))
    (found,) = replay(parse_snapshot(real["snapshot"], 10**9, facts))

    assert found.live_at_start > 10
    assert found.events > 300
    assert found.first_difference is None
    assert found.is_final_equal


POOLS_AND_A_FIT = """
import gc, random, torch
from torch import nn
memory = torch.cuda.memory
memory._record_memory_history(stacks="python")
def block(mib): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
kept, pool = block(3), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    a, b = block(5), torch.empty(100, device="cuda")
    c = block(7); del c
    d = block(6)
del a, d
torch.cuda.empty_cache()
graph, x = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
with torch.cuda.graph(graph):
    y = x + 1; big = block(30); del big; z = block(10)
memory._dump_snapshot(FOLDER + "/pools.pickle")
del y, z, graph, b, pool; gc.collect()
torch.cuda.empty_cache()
net = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]).cuda()
opt = torch.optim.Adam(net.parameters())
for step in range(16):
    if step == 6:
        memory._dump_snapshot(FOLDER + "/gone.pickle")
        memory._record_memory_history(None)
        memory._record_memory_history(stacks="python")
    net(torch.randn((16, 16, 5, 8)[step % 4], 8, 64, 64).cuda()).mean().backward()
    opt.step(); opt.zero_grad()
    if step % 5 == 4: torch.cuda.empty_cache()
memory._dump_snapshot(FOLDER + "/midrun.pickle")
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_private_pools_and_a_fit_replay(conf: str, tmp_path: Path, fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(f"FOLDER = {str(tmp_path)!r}\n{POOLS_AND_A_FIT}", conf=conf)

    snapshots = {name: load_snapshot(tmp_path / f"{name}.pickle") for name in ("pools", "gone", "midrun")}
    found = {name: replay(snapshot)[0] for name, snapshot in snapshots.items()}

    assert len({segment.pool for segment in snapshots["pools"].segments}) == 3
    assert found["midrun"].live_at_start > 40
    assert found["midrun"].events > 1000
    for each in found.values():
        assert each.first_difference is None
        assert each.is_final_equal


def _run(run: Callable[..., str], ops: list[list[object]], conf: str, fraction: float, *, history: bool) -> dict[str, object]:
    code = f"OPS, FRACTION, HISTORY = {json.dumps(ops)!r}, {fraction}, {history}\n{RUN}"
    found: dict[str, object] = json.loads(run(code, conf=conf, bytes=CAPACITY).splitlines()[-1])
    return found


def _model(real: dict, ops: list[list[object]], conf: str, fraction: float) -> CachingAllocator:  # type: ignore[type-arg]
    """Let the model do the same. It is told the streams' handles and how much room there is, and nothing else."""
    driver = FirstFit(real["free"])
    settings = AllocatorSettings.parse(conf, parse_version(real["torch"]))
    model = CachingAllocator(settings, real["total"], fraction, real["torch"], driver)
    live: dict[object, int] = {}
    for op in ops:
        match op:
            case ["malloc", name, int(size), stream]:
                try:
                    live[name] = model.malloc(size, real["handles"][str(stream)])
                except SimulatedOutOfMemoryError:
                    continue
            case ["free", name]:
                model.free(live.pop(name, 0))
            case ["record", name, stream]:
                if name in live:
                    model.record_stream(live[name], real["handles"][str(stream)])
            case ["empty"]:
                model.empty_cache()
    return model


def _plain(event: dict) -> tuple[str, int, int, int]:  # type: ignore[type-arg]
    return event["action"], event.get("addr", event.get("device_free")), event["size"], event["stream"]


def _segment(segment: dict) -> tuple[object, ...]:  # type: ignore[type-arg]
    blocks = [(block["address"], block["size"], block["requested_size"], block["state"]) for block in segment["blocks"]]
    keys = (
        "address",
        "total_size",
        "stream",
        "segment_type",
        "is_expandable",
        "allocated_size",
        "active_size",
        "requested_size",
    )
    return tuple(segment[key] for key in keys), segment["is_expandable"], tuple(segment["segment_pool_id"]), blocks
