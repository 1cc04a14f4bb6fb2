"""The random number generators of the libraries of this process, to be left as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_DEVICES = ("cuda", "xpu", "mps", "mtia")


class LibraryGenerators:
    """The states of Python's, numpy's and torch's global generators as they are now, to be put back any number of times.

    Generators of a device are read only where the device is in use: to ask for them would open it.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules.get("torch")
        numpy: Any = sys.modules.get("numpy")
        self._kept: list[tuple[str, Callable[[Any], object], Any]] = [("python", random.setstate, random.getstate())]
        if numpy is not None:
            self._kept.append(("numpy", numpy.random.set_state, numpy.random.get_state()))
        if torch is None:
            return
        self._kept.append(("torch", torch.set_rng_state, torch.get_rng_state()))
        for name in _DEVICES:
            module = getattr(torch, name, None)
            if module is not None and is_in_use(module) and hasattr(module, "get_rng_state_all"):
                self._kept.append((name, module.set_rng_state_all, module.get_rng_state_all()))
            elif name == "mps" and module is not None and is_in_use(module):
                self._kept.append((name, module.set_rng_state, module.get_rng_state()))

    @property
    def states(self) -> list[tuple[str, Any]]:
        """Return (library or device, state) of each: python, numpy, torch, then the devices in use."""
        return [(name, state) for name, _, state in self._kept]

    def restore(self) -> None:
        """Put all of them back."""
        for _, put, state in self._kept:
            put(state)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the generators of the libraries as they were, whatever is drawn inside."""
    generators = LibraryGenerators()
    try:
        yield
    finally:
        generators.restore()


def is_in_use(module: Any) -> bool:
    """Say whether a device has been opened by this process."""
    initialised = getattr(module, "is_initialized", None)
    if initialised is not None:
        return bool(initialised())
    allocated = getattr(module, "current_allocated_memory", None)
    return allocated is not None and sys.platform == "darwin" and bool(allocated())
