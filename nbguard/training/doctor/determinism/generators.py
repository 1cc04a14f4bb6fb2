"""Random number generators that an object has of its own, so that no seed of a library reaches them."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of

SEEDED: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
"""Ids of the generators that have been seeded, by whatever did so, which keeps them: numpy's cannot be held weakly."""


def is_seeded(generator: Any) -> bool:
    """Say whether a generator has its state from a seed that nbguard set and has not undone."""
    return any(id(generator) in ids for ids in SEEDED.values())


def state_of(generator: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """Return (state, function that puts a state back) of a generator object, or None if it is no generator."""
    torch: Any = sys.modules["torch"]
    numpy: Any = sys.modules.get("numpy")
    bases = mro_of(type(generator))
    if random.Random in bases:
        return random.Random.getstate(generator), lambda state: random.Random.setstate(generator, state)
    if torch.Generator in bases:
        return generator.get_state(), generator.set_state
    if numpy is None:
        return None
    if numpy.random.Generator in bases:
        return _bits_of(generator.bit_generator)
    if numpy.random.RandomState in bases:
        return generator.get_state(legacy=False), generator.set_state
    if numpy.random.BitGenerator in bases:
        return _bits_of(generator)
    return None


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator that is an object of its own, of the kinds that `state_of` knows."""
    torch: Any = sys.modules["torch"]
    if random.Random in mro_of(type(generator)):
        random.Random.seed(generator, seed)
    elif torch.Generator in mro_of(type(generator)):
        generator.manual_seed(seed)
    elif hasattr(generator, "seed"):
        generator.seed(seed)
    else:  # numpy's: a state from a new one of the same kind
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def _bits_of(bits: Any) -> tuple[Any, Callable[[Any], object]]:
    def put(state: Any) -> None:
        bits.state = state

    return copy.deepcopy(bits.state), put
