"""Profiles of real fits, saved for the tests: `python -m tests.profiler.record_profiles` writes them anew.

After that, `pytest tests/profiler/test_observations.py --update-golden` writes their reports anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import nbguard
from nbguard.training.profiler.profile import forget
from tests.profiler.loops import learner, quiet_fit, torch_loader, train

FOLDER = Path(__file__).parents[1] / "data" / "profile"


def fastai_fit() -> None:
    """A fastai fit that is healthy."""
    quiet_fit(learner(count=160), 3)


def plain_loop() -> None:
    """A loop of PyTorch's own that keeps the graph of each loss, reads it, and runs into a NaN."""
    losses = []

    def keep(loss: torch.Tensor) -> None:
        losses.append(loss)
        if len(losses) == 45:
            (nn.Linear(1, 1)(torch.tensor([float("nan")]))).backward()
        loss.item()

    train(3, loader=torch_loader(count=240), each=keep)


FITS: dict[str, tuple[Callable[[], None], bool]] = {"fastai": (fastai_fit, False), "loop": (plain_loop, True)}
"""Each fit by the name of its file, and whether two of its batches are recorded allocation by allocation."""


def main() -> None:
    """Record all fits, each after a run that is not recorded: what a process does for the first time is not the fit's."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, (fit, memory) in FITS.items():
        forget()
        for _ in range(2):
            with nbguard.profile_fit(show=False, memory=memory, compare=True, save=str(FOLDER / f"{name}.json")):
                fit()


if __name__ == "__main__":
    main()
