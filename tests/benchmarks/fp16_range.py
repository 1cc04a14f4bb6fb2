"""What the watch over float16's range adds to a batch of a profiled fit: the same fit with and without it, in turns.

python tests/benchmarks/fp16_range.py [--rounds 10]

Both fits are profiled; only the watch is left out of one. The figures are ratios of the quickest and the median batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch import nn

import nbguard
from nbguard.training.profiler.checks.fp16_range import RangeWatch

_BATCHES = 100


def fit(width: int) -> list[int]:
    """Return the nanoseconds of each batch of a loop under autocast in float16, which is profiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, times = torch.randn(64, width), []
    with nbguard.profile_fit(show=False):
        for _ in range(_BATCHES):
            start = time.perf_counter_ns()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter_ns() - start)
    return times


def without() -> AbstractContextManager[object]:
    """Leave the watch out."""
    return patch.multiple(RangeWatch, start=lambda *_: None, stop=lambda *_: None)


def main() -> None:
    """Print the times of a batch with and without the watch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    for width in (16, 64):
        fit(width)
        pairs: list[list[list[int]]] = [[], []]
        for number in range(rounds):
            for watched in (True, False) if number % 2 else (False, True):
                with nullcontext() if watched else without():
                    pairs[watched].append(fit(width))
        quickest = [min(map(min, each)) for each in pairs]
        median = [statistics.median(map(statistics.median, each)) for each in pairs]
        print(
            f"width {width}: quickest batch {quickest[1] / quickest[0]:.3f} × ({(quickest[1] - quickest[0]) / 1000:+.1f} µs of "
            f"{quickest[0] / 1000:.0f}), median {median[1] / median[0]:.3f} × ({(median[1] - median[0]) / 1000:+.1f} µs of "
            f"{median[0] / 1000:.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
