"""How long nbguard takes on a GPU, beside torch's own calls in the same run: `python -m tests.gpu.bench FILE`.

Compared, with thousands of CUDA storages alive:
  report()    with torch.cuda.memory_snapshot() and torch.cuda.memory_summary(), which say how much and not who
  release()   with `del`, gc.collect() and empty_cache() by hand, which promise and measure nothing
And whether report() waits for the GPU. Prints medians and ratios and writes them as JSON; it never fails by time.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nbguard
from tests.gpu.device import look

_ROUNDS = 5
_COUNTS = (1_000, 10_000)
_STORAGE = 4096


def holding(count: int) -> dict[str, Any]:
    """Return a namespace with `count` storages in ten lists."""
    tensors = [torch.empty(_STORAGE, dtype=torch.uint8, device="cuda") for _ in range(count)]
    return {"runs": {f"run {n}": tensors[n::10] for n in range(10)}}


def median(setup: Callable[[], Any], call: Callable[[Any], object]) -> float:
    """Return the median time of `call` on what `setup` makes anew for each round, in seconds."""
    times = []
    for _ in range(_ROUNDS):
        made = setup()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(made)
        times.append(time.perf_counter() - started)
        del made
    return statistics.median(times)


def by_hand(names: dict[str, Any]) -> None:
    """Free as one does without nbguard."""
    del names["runs"]
    gc.collect()
    torch.cuda.empty_cache()


def timings(count: int) -> dict[str, float]:
    """Return the median seconds of each call with `count` storages alive."""
    names = holding(count)
    report = {
        "report()": median(lambda: None, lambda _: nbguard.report(names)),
        "torch.cuda.memory_snapshot()": median(lambda: None, lambda _: torch.cuda.memory_snapshot()),
        "torch.cuda.memory_summary()": median(lambda: None, lambda _: torch.cuda.memory_summary()),
    }
    names.clear()
    return report | {
        'release("runs")': median(lambda: holding(count), lambda made: nbguard.release("runs", namespace=made)),
        "del, gc.collect(), empty_cache()": median(lambda: holding(count), by_hand),
    }


def waiting() -> dict[str, Any]:
    """Return how long report() took while a kernel of a known length ran, and whether that still ran afterwards."""
    names = holding(1_000)
    nbguard.report(names)
    torch.cuda._sleep(1_000)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(1_000_000_000)
    torch.cuda.synchronize()
    kernel = time.perf_counter() - started
    ended = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    ended.record()
    started = time.perf_counter()
    nbguard.report(names)
    seconds = time.perf_counter() - started
    runs_on = not ended.query()
    torch.cuda.synchronize()
    return {"kernel": kernel, "report": seconds, "runs_on": runs_on}


def main(file: Path) -> None:
    """Measure, print and write."""
    figures: dict[str, Any] = {
        "device": look(),
        "objects": len(gc.get_objects()),
        "rounds": _ROUNDS,
        "timings": {str(count): timings(count) for count in _COUNTS},
        "waiting": waiting(),
    }
    file.write_text(json.dumps(figures, indent=1))
    for count, found in figures["timings"].items():
        for name, seconds in found.items():
            print(f"  {count:>6} storages   {name:<34} {seconds * 1000:>9.2f} ms")
    found = figures["waiting"]
    print(f"  report() took {found['report'] * 1000:.1f} ms while a kernel of {found['kernel'] * 1000:.0f} ms ran", end="; ")
    print("the kernel was still running when it returned" if found["runs_on"] else "the kernel had ended when it returned")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
