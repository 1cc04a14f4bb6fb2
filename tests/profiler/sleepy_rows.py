"""A data set of a module of its own, that workers which are started anew import quickly."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset

SLEEP = 0.005
"""Seconds that an item takes at least."""


class SleepyRows(Dataset):  # type: ignore[type-arg]
    """Items that take long, with a target each."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        """Return the number of items."""
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an item of eight values, and its target."""
        time.sleep(SLEEP)
        return torch.full((8,), float(i)), torch.tensor(i / 100)
