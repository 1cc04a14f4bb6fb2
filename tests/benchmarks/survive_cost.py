"""What a guard against running out of memory adds to a step in which nothing runs out, in instructions, beside the step itself.

    python tests/benchmarks/survive_cost.py

Instructions are counted by valgrind's callgrind (apt-get install valgrind; some minutes). Their share is of the instructions
that the loop executes in 10 ms, by its own rate on this machine.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import callgrind  # noqa: E402 - a script

WAYS = ("without", "with", "function")
LAYERS, WARM, COUNTED = 75, 6, 10


def steps(way: str) -> Callable[[], None]:
    """Return a step of a training with 150 parameters, guarded in one way."""
    import numpy as np
    import torch
    from torch import nn

    import nbguard

    np.random.seed(0)  # as a notebook that has numpy
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    guard: Any = nullcontext() if way == "without" else nbguard.survive(model, optimizer)
    guard.__enter__()
    return guard(step) if way == "function" else step


def count(way: str) -> None:
    """Run steps in callgrind, and have it write what `COUNTED` of them take."""
    step = steps(way)
    gc.disable()
    for number in range(WARM + COUNTED + 1):
        if number in (WARM - 2, WARM, WARM + COUNTED):
            callgrind.order({WARM - 2: "--instr=on", WARM: "--dump=before"}.get(number, "--dump=counted"))
        step()


def measure() -> None:
    """Print the seconds of a step without a guard."""
    step, best = steps("without"), 1e9
    for _ in range(20):
        start = time.process_time()
        for _ in range(20):
            step()
        best = min(best, (time.process_time() - start) / 20)
    print(best)


def main() -> None:
    found = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, "--count", way]
            found[way] = dict(callgrind.counted(command, folder))["counted"][0] / COUNTED
    command = [sys.executable, "-W", "ignore", __file__, "--measure"]
    seconds = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    in_10_ms = found["without"] / seconds * 0.01
    print(f"a step of {2 * LAYERS} parameters: {found['without']:,.0f} instructions, {seconds * 1e3:.2f} ms")
    for way in WAYS[1:]:
        more = found[way] - found["without"]
        print(f"    guarded ({way}): {more:+,.0f} instructions, {more / in_10_ms:.2%} of a step of 10 ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count(sys.argv[2])
    elif sys.argv[1:] == ["--measure"]:
        measure()
    else:
        main()
