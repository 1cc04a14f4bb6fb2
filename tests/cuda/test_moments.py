"""States in the middle of a recorded run, rebuilt from its last snapshot, against PyTorch's own snapshots of that time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from nbguard.memory.allocator.replay.moments import TraceMoments
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, parse_snapshot
from tests.allocator.test_moments import real, rebuilt
from tests.thorough import examples

_RUN = """
import pickle, random, torch
chance = random.Random({seed})
torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
side, pool = torch.cuda.Stream(), torch.cuda.MemPool()
sizes = [3, 600, 4000, 70_000, 900_000, 1 << 21, 3 << 20, 11 << 20, 25 << 20]
def tensor():
    size = chance.randint(1, chance.choice(sizes))
    match chance.randrange(12):
        case 0:
            with torch.cuda.stream(side):
                return torch.empty(size, dtype=torch.uint8, device="cuda")
        case 1:
            with torch.cuda.use_mem_pool(pool):
                return torch.empty(size, dtype=torch.uint8, device="cuda")
        case _:
            return torch.empty(size, dtype=torch.uint8, device="cuda")
held, moments = [], []
def step():
    if held and chance.random() < len(held) / 80:
        gone = held.pop(chance.randrange(len(held)))
        if chance.random() < 0.2:
            gone.record_stream(side)
        return
    try:
        held.append(tensor())
    except torch.OutOfMemoryError:
        del held[::3]
for moment in range({count}):
    for _ in range(chance.randrange(60)):
        step()
        if chance.random() < 0.01:
            torch.cuda.empty_cache()
    there = torch.cuda.memory._snapshot()
    segments = [segment for segment in there["segments"] if segment["device"] == 0]
    moments.append((len(there["device_traces"][0]), segments))
with open("{file}", "wb") as file:
    pickle.dump((str(torch.__version__), moments, torch.cuda.memory._snapshot()), file)
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:20,roundup_power2_divisions:4"])
def test_any_moment_is_as_pytorch_saw_it(conf: str, fake_cuda_run: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "run"
    count = examples(10)
    fake_cuda_run(
        _RUN.format(seed=count, count=count, file=file),
        conf=conf,
        timeout=900,
        bytes=1 << 30,
        context=64 << 20,
        events="manual",
    )
    version, there, last = pickle.loads(file.read_bytes())
    assert len(there) == count

    for cut in (0, len(last["device_traces"][0]) // 2):
        ring = {**last, "device_traces": [last["device_traces"][0][cut:]]}
        moments = TraceMoments(parse_snapshot(ring, 1 << 40, Sidecar(torch_version=version, totals=(1 << 30,))), 0)
        assert moments.replay.is_exact
        for events, segments in there:
            if events < cut:
                continue
            moment = moments.at(events - cut)
            assert moment.unsure or rebuilt(moment) == real(sorted(segments, key=lambda segment: segment["address"])), events
            stacks = {
                block.address: moment.snapshot.stacks[block.stack]
                for segment in moment.snapshot.segments
                for block in segment.blocks
                if block.stack >= 0 and block.state == "active_allocated"
            }
            for segment in segments:
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated" and block["address"] not in moment.forgotten:
                        frames = [(frame["filename"], frame["line"], frame["name"]) for frame in block["frames"]]
                        assert list(stacks[block["address"]]) == frames
