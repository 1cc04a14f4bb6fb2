"""What the simulated device costs, beside the same code without it and beside a dispatch mode that does nothing.

    python tests/benchmarks/simulate.py [--rounds 7]

Times a training step (forward, backward, Adam) of a small and of a larger network on one CPU thread, and an operation that
does almost nothing. Prints the best of the rounds, and the ratio; it never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nbguard


class Nothing(TorchDispatchMode):
    """The least that a dispatch mode can do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def training(width: int, batch: int) -> Callable[[], None]:
    """Return a training step of an MLP of four layers."""
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(batch, width)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tiny() -> None:
    """Make and drop many small tensors."""
    x = torch.ones(4)
    for _ in range(200):
        x = x + 1


def seconds(act: Callable[[], None], mode: Any, repeats: int) -> float:
    """Return the time of one call under a mode."""
    with mode:
        act()
        start = time.perf_counter()
        for _ in range(repeats):
            act()
        return (time.perf_counter() - start) / repeats


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    modes: dict[str, Callable[[], Any]] = {
        "plain": contextlib.nullcontext,
        "empty mode": Nothing,
        "simulated": lambda: nbguard.simulate("64GiB"),
    }
    cases: dict[str, tuple[Callable[[], None], int]] = {
        "200 additions of 4 numbers": (tiny, 20),
        "training step, width 64, batch 32": (training(64, 32), 20),
        "training step, width 1024, batch 256": (training(1024, 256), 2),
    }
    print(f"torch {torch.__version__}, one thread, best of {rounds} rounds\n")
    print(f"{'':38}" + "".join(f"{name:>14}" for name in modes) + f"{'ratio':>8}")
    for title, (act, repeats) in cases.items():
        best = {name: min(seconds(act, make(), repeats) for _ in range(rounds)) for name, make in modes.items()}
        row = "".join(f"{time_ * 1e3:11.3f} ms" for time_ in best.values())
        print(f"{title:38}{row}{best['simulated'] / best['plain']:8.2f}")


if __name__ == "__main__":
    main()
