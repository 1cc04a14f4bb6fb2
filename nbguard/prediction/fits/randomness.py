"""The generators of random numbers, left as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def same_randomness() -> Iterator[None]:
    """Put the generators of random numbers back as they were: Python's, numpy's and torch's for the CPU."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
