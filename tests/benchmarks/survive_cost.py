"""What a guard against running out of memory adds to a step in which nothing runs out, as a share of a step of 10 ms.

    python tests/benchmarks/survive_cost.py                   # instructions, counted by callgrind (apt-get install valgrind)
    python tests/benchmarks/survive_cost.py --time            # processor time, as a ratio of steps side by side

Instructions are compared with those that the loop executes in 10 ms, by its own rate on this machine. PyTorch is imported once,
as that takes most of the time in callgrind.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import callgrind  # noqa: E402 - a script

WAYS = ("without", "with", "function")
LAYERS = (5, 75)
"""Linear layers of two parameters each: of a small model, and of one with as many as a ResNet-50 has."""
WARM, COUNTED = 4, 5
ROUNDS, BLOCK = 200, 10
"""Rounds of blocks of steps, one of each way, that are timed."""


class Training:
    """A training of so many layers, guarded in one way or in none."""

    def __init__(self, way: str, layers: int) -> None:
        import numpy as np
        import torch
        from torch import nn

        import nbguard

        np.random.seed(0)  # as a notebook that has numpy
        torch.set_num_threads(1)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        guard: Any = nullcontext() if way == "without" else nbguard.survive(model, optimizer)
        self.guard: AbstractContextManager[Any] = guard
        self.step: Callable[[], None] = guard(step) if way == "function" else step

    def run(self, steps: int) -> None:
        """Run so many steps within the guard."""
        with self.guard:
            for _ in range(steps):
                self.step()

    def seconds(self) -> float:
        """Return the processor time of a step in a block of them, to enter the guard not counted."""
        with self.guard:
            self.step()
            start = time.process_time()
            for _ in range(BLOCK):
                self.step()
            return (time.process_time() - start) / BLOCK


def count(layers: int) -> None:
    """Run steps in callgrind, and have it write what each way has taken in all after `WARM` and `WARM + COUNTED` of them."""
    trainings = {way: Training(way, layers) for way in WAYS}
    gc.disable()
    for training in trainings.values():
        training.run(WARM)
    callgrind.order("--instr=on")
    for way, training in trainings.items():
        for steps, label in ((1, "few"), (1 + COUNTED, "many")):  # the difference: to enter the guard is not counted
            training.run(WARM)
            callgrind.order("--dump=before")
            training.run(steps)
            callgrind.order(f"--dump={label}_{way}")


def in_instructions(layers: int) -> None:
    """Print the instructions that a guard adds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--count", str(layers)]
        totals = {label: counts[0] for label, counts in callgrind.counted(command, folder)}
    found = {way: (totals[f"many_{way}"] - totals[f"few_{way}"]) / COUNTED for way in WAYS}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", str(layers)]
    seconds = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    in_10_ms = found["without"] / seconds * 0.01
    print(f"a step of {2 * layers} parameters: {found['without']:,.0f} instructions, {seconds * 1e3:.2f} ms")
    for way in WAYS[1:]:
        more = found[way] - found["without"]
        print(f"    guarded ({way}): {more:+,.0f} instructions, {more / in_10_ms:.2%} of a step of 10 ms")


def in_time(layers: int) -> None:
    """Print the processor time that a guard adds, by the median of the ratios of blocks that ran after one another."""
    trainings = {way: Training(way, layers) for way in WAYS}
    gc.disable()
    rounds = [{way: training.seconds() for way, training in trainings.items()} for _ in range(ROUNDS)]
    least = min(each["without"] for each in rounds)
    print(f"a step of {2 * layers} parameters: {least * 1e6:.0f} µs of processor time")
    for way in WAYS[1:]:
        ratio = statistics.median(each[way] / each["without"] for each in rounds)
        more = (ratio - 1) * least
        print(f"    guarded ({way}): ×{ratio:.4f}, {more * 1e6:+.1f} µs, {more / 0.01:.2%} of a step of 10 ms")


def main(arguments: list[str]) -> None:
    """Print what a guard adds, or do the part of it that runs by itself."""
    match arguments:
        case ["--count", layers]:
            count(int(layers))
        case ["--measure", layers]:
            training = Training("without", int(layers))
            print(min(training.seconds() for _ in range(40)))
        case _:
            for layers in LAYERS:
                (in_time if arguments == ["--time"] else in_instructions)(layers)


if __name__ == "__main__":
    main(sys.argv[1:])
