"""How fast the allocator's model replays a trace, how that and its memory grow, and what loading a large snapshot takes.

NBGUARD_RECORDED_DATA=FOLDER python tests/benchmarks/replay.py [--rounds 7] [--megabytes 100]

Times are processor time of one core, the best of the rounds. The first figure is on the recorded `classic_from_start`,
where the folder is given; the others are on a synthetic training loop.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from nbguard.allocator.model.allocator import CachingAllocator
from nbguard.allocator.replay.replay import best_play, recorded_device
from nbguard.allocator.snapshot.read import load_snapshot
from nbguard.allocator.snapshot.schema import parse_snapshot
from nbguard.allocator.snapshot.snapshot import Sidecar, Snapshot

SIZES = (10_000, 100_000, 1_000_000)


def training(model: CachingAllocator, events: int, seed: int = 0) -> Iterator[None]:
    """Drive a model like a training loop, until it has done so many events: weights, then activations by layer and back."""
    rng = random.Random(seed)
    weights = [rng.choice((4, 64, 256, 1024, 4096, 9000)) * rng.randrange(256, 1400) for _ in range(80)]
    for size in weights:
        model.malloc(size)
        model.malloc(size)
    done = 2 * len(weights)
    while done < events:
        batch = rng.choice((1.0, 1.0, 1.0, 0.4))
        activations = []
        for size in weights:
            workspace = model.malloc(int(size * 1.7) + 1)
            activations.append(model.malloc(int(size * 3 * batch) + 1))
            model.free(workspace)
            done += 4
            yield
        while activations:
            gradient = model.malloc(weights[len(activations) - 1])
            model.free(activations.pop())
            model.free(gradient)
            done += 5
            yield


def synthetic(events: int) -> Snapshot:
    """Return a snapshot of a training loop with a trace of so many events."""
    model = CachingAllocator(torch_version="2.13")
    for _ in training(model, events):
        if len(model.events) >= events:
            break
    trace = [{"action": a, "addr": address, "size": size, "stream": stream} for a, address, size, stream in model.events]
    return parse_snapshot({"segments": model.segments(), "device_traces": [trace]}, 10**12, Sidecar(torch_version="2.13"))


def speed(snapshot: Snapshot, rounds: int) -> tuple[int, float, bool]:
    """Return (events, best seconds, whether all is exact) of rolling back, setting up, replaying and comparing."""
    best, exact, events = float("inf"), True, 0
    for _ in range(rounds):
        begun = time.process_time()
        found = best_play(recorded_device(snapshot, 0))[1]
        best = min(best, time.process_time() - begun)
        exact, events = exact and found.is_exact, found.events
    return events, best, exact


def memory(events: int) -> tuple[int, int]:
    """Return (blocks at the end, peak bytes of the model) of a run of so many events that nobody keeps."""
    tracemalloc.start()
    model = CachingAllocator(torch_version="2.13")
    for _ in training(model, events):
        model.events.clear()
    blocks = sum(len(segment["blocks"]) for segment in model.segments())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return blocks, peak


def write_large(path: Path, megabytes: int) -> None:
    """Write a snapshot of about so many MB as PyTorch pickles them, stacks and all."""
    rng = random.Random(0)
    frames = [{"filename": f"/site-packages/torch/nn/module_{i}.py", "line": i, "name": f"forward_{i}"} for i in range(3000)]
    rest = {"time_us": 1_700_000_000_000_000, "compile_context": "N/A", "user_metadata": ""}
    model = CachingAllocator(torch_version="2.13")
    for _ in training(model, megabytes * 6500):
        continue
    trace: list[dict[str, Any]] = []
    for action, address, size, stream in model.events:
        event = {"action": action, "addr": address, "size": size, "stream": stream} | rest
        trace.append(event | {"time_us": rest["time_us"] + len(trace), "frames": rng.choices(frames, k=20)})
    with path.open("wb") as file:
        pickle.dump({"segments": model.segments(), "device_traces": [trace]}, file)


def loading(megabytes: int) -> str:
    """Return what loading a large snapshot takes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pickle"
        subprocess.run([sys.executable, __file__, "--write", str(path), "--megabytes", str(megabytes)], check=True)
        size = path.stat().st_size
        done = subprocess.run([sys.executable, __file__, "--load", str(path)], capture_output=True, text=True, check=True)
    return f"  loading {size / 1e6:.0f} MB: {done.stdout.strip()}"


def load(path: Path) -> None:
    """Load a snapshot and print what it took."""
    import resource

    steps: list[int] = []
    begun = time.process_time()
    found = load_snapshot(path, lambda done, _total: steps.append(done))
    spent = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    events = len(found.traces[0].events)
    print(f"{events} events, {spent:.1f} s, peak of the process {peak:.0f} MiB, progress told {len(steps)} times")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        return write_large(options.write, options.megabytes)
    if options.load:
        return load(options.load)
    folder = os.environ.get("NBGUARD_RECORDED_DATA")
    if folder:
        snapshot = load_snapshot(Path(folder) / "classic_from_start.json.gz")
        events, seconds, exact = speed(snapshot, options.rounds)
        print(f"  classic_from_start: {events} events, {events / seconds / 1000:.0f} k events/s, exact: {exact}")
    for size in SIZES:
        events, seconds, exact = speed(synthetic(size), min(options.rounds, 3))
        blocks, peak = memory(size)
        print(
            f"  training loop, {events:>9,} events: {events / seconds / 1000:6.0f} k events/s, exact: {exact}, "
            f"{blocks} blocks at the end, model's peak {peak / 1024:.0f} KiB"
        )
    return print(loading(options.megabytes))


if __name__ == "__main__":
    main()
