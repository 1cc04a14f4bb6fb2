"""The random number generators of the process, left as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept() -> Iterator[None]:
    """Keep the state of every generator: Python's, numpy's, torch's, and CUDA's if it is in use."""
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    before = random.getstate(), numpy and numpy.random.get_state(), torch and torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
        if torch:
            torch.set_rng_state(before[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
