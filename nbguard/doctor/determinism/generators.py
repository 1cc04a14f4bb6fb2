"""Random number generators: those of the libraries, which a seed reaches, and those that an object has of its own."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

from nbguard.scan.heap.kinds import mro_of

_DEVICES = ("cuda", "xpu", "mps", "mtia")


class LibraryGenerators:
    """The states of Python's, numpy's and torch's global generators as they are now, to be put back any number of times.

    Generators of a device are read only where the device is in use: to ask for them would open it.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        numpy: Any = sys.modules.get("numpy")
        self._states: list[tuple[Callable[[Any], object], Any]] = [
            (random.setstate, random.getstate()),
            (torch.set_rng_state, torch.get_rng_state()),
        ]
        if numpy is not None:
            self._states.append((numpy.random.set_state, numpy.random.get_state()))
        for name in _DEVICES:
            module = getattr(torch, name, None)
            if module is not None and _is_in_use(module) and hasattr(module, "get_rng_state_all"):
                self._states.append((module.set_rng_state_all, module.get_rng_state_all()))
            elif name == "mps" and module is not None and _is_in_use(module):
                self._states.append((module.set_rng_state, module.get_rng_state()))

    def restore(self) -> None:
        """Put all of them back."""
        for put, state in self._states:
            put(state)


def _is_in_use(module: Any) -> bool:
    """Say whether a device has been opened by this process."""
    initialised = getattr(module, "is_initialized", None)
    if initialised is not None:
        return bool(initialised())
    allocated = getattr(module, "current_allocated_memory", None)
    return allocated is not None and sys.platform == "darwin" and bool(allocated())


def state_of(generator: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """Return (state, what puts a state back) of a generator that is an object of its own; None if it is no generator."""
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
