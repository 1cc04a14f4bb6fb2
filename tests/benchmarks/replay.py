"""How fast the allocator's model replays a trace, how that and its memory grow, and what loading a large snapshot takes; what
each command of the command line takes on it.

NBGUARD_RECORDED_DATA=FOLDER python tests/benchmarks/replay.py [--rounds 7] [--megabytes 100]

Times are processor time of one core, the best of the rounds. The first figure is on the recorded `classic_from_start`,
where the folder is given; the others are on a synthetic training loop.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.replay.replay import best_play, recorded_device
from nbguard.memory.allocator.snapshot.read import load_snapshot
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, parse_snapshot

SIZES = (10_000, 100_000, 1_000_000)
COMMANDS = ("map", "replay", "whatif", "diagnose")


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
    """Write a snapshot of about so many MB as PyTorch pickles them: each event has a list of frames of its own."""
    rng = random.Random(0)
    frames = [{"filename": f"/site-packages/torch/nn/module_{i}.py", "line": i, "name": f"forward_{i}"} for i in range(3000)]
    stacks = [rng.choices(frames, k=20) for _ in range(3000)]
    rest = {"time_us": 1_700_000_000_000_000, "compile_context": "N/A", "user_metadata": ""}
    model = CachingAllocator(torch_version="2.13")
    for _ in training(model, megabytes * 6500):
        continue
    trace: list[dict[str, Any]] = []
    for action, address, size, stream in model.events:
        event = {"action": action, "addr": address, "size": size, "stream": stream} | rest
        trace.append(event | {"time_us": rest["time_us"] + len(trace), "frames": [*rng.choice(stacks)]})
    with path.open("wb") as file:
        pickle.dump({"segments": model.segments(), "device_traces": [trace]}, file)


def loading(megabytes: int, rounds: int) -> Iterator[str]:
    """Yield lines on loading a large snapshot, and on `pickle.load` of it, in turns and each in a fresh process.

    Then on each command that reads one, once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pickle"
        subprocess.run([sys.executable, __file__, "--write", str(path), "--megabytes", str(megabytes)], check=True)
        size = path.stat().st_size
        figures: dict[str, list[tuple[float, ...]]] = {"--load": [], "--pickle": []}
        for _ in range(rounds):
            for way, seen in figures.items():
                done = subprocess.run([sys.executable, __file__, way, str(path)], capture_output=True, text=True, check=True)
                seen.append(tuple(map(float, done.stdout.split())))
        commands = [command_line(name, path) for name in COMMANDS]
    yield f"  loading {size / 1e6:.0f} MB"
    for way, seen in figures.items():
        seconds, wall, own, largest = (statistics.median(column) for column in zip(*seen, strict=True))
        name = "nbguard" if way == "--load" else "pickle.load"
        peaks = f"peak of this process {own:.0f} MiB, of the largest {largest:.0f} MiB"
        yield f"    {name:<12} {seconds:.1f} s of processor time, {wall:.1f} s in all, {peaks}"
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(figures["--load"], figures["--pickle"], strict=True)]
    yield f"    ratio of processor time: {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    yield from commands


def command_line(name: str, path: Path) -> str:
    """Return a line on what a command of the command line takes on a snapshot, with the processes that it starts."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "nbguard", name, str(path)], capture_output=True, text=True, check=False)
    after, wall = os.times(), time.perf_counter() - start
    assert done.returncode in (0, 1), done.stderr
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return f"    nbguard {name:<8} {spent:.1f} s of processor time, {wall:.1f} s in all"


def load(read: Callable[[], object]) -> None:
    """Load a snapshot; print seconds of processor time and in all, MiB of this process and of the largest that it started."""
    import resource

    before, start = sum(os.times()[:4]), time.perf_counter()
    loaded = read()
    spent, wall = sum(os.times()[:4]) - before, time.perf_counter() - start
    del loaded
    own = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024  # ru_maxrss has the parent's
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(spent, wall, own, max(own, others))


def unpickle(path: Path) -> object:
    """Return what Python's own unpickler makes of a file, trusting it."""
    with path.open("rb") as file:
        return pickle.load(file)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pickle", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        return write_large(options.write, options.megabytes)
    if options.load:
        return load(lambda: load_snapshot(options.load, lambda _done, _total: None))
    if options.pickle:
        return load(lambda: unpickle(options.pickle))
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
    return print(*loading(options.megabytes, min(options.rounds, 3)), sep="\n")


if __name__ == "__main__":
    main()
