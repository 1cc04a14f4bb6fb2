"""The states of the generators of random numbers, so that a batch which runs again draws the same ones."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


class HostGenerators:
    """The states of Python's `random` and of numpy's generator at one moment; of the latter only where numpy is imported."""

    def __init__(self) -> None:
        self._random = _python_state()
        self._numpy = _numpy_state()

    def restore(self) -> bool:
        """Put them back; say whether one of them had moved."""
        now = HostGenerators()
        random.setstate(self._random)
        if self._numpy is None:
            return bool(now._random != self._random)
        sys.modules["numpy.random"].set_state(self._numpy)
        return bool(now._random != self._random) or pickle.dumps(now._numpy) != pickle.dumps(self._numpy)


class Generators:
    """The states of all default generators at one moment: the host's, and PyTorch's for the host and its devices."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self._host = HostGenerators()
        generators = [torch.default_generator]
        for kind in ("cuda", "xpu"):
            module = getattr(torch, kind, None)
            if module is not None and module.is_initialized():
                generators.append(module.default_generators[module.current_device()])
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> bool:
        """Put them back; say whether any of them had moved."""
        has_moved = self._host.restore()
        for generator, state in self._states:
            has_moved |= not bool((generator.get_state() == state).all())
            generator.set_state(state)
        return has_moved


class _Kept:
    """The state of a generator as it was last asked for, and a mark of the memory that it lies in, which takes 2 µs to read."""

    def __init__(self) -> None:
        self._mark: object = None
        self._state: Any = None

    def state(self, mark: object, ask: Callable[[], Any]) -> Any:
        """Return the state; it is asked for again if the mark is another, or None."""
        if mark is None or mark != self._mark:
            self._state, self._mark = ask(), mark
        return self._state


_python, _numpy = _Kept(), _Kept()
_BYTES = 625 * 4
"""Bytes of a Mersenne twister: its words, and its place in them."""
_IS_CPYTHON = sys.implementation.name == "cpython"
"""Objects of CPython stay at the address that their id is."""


def _python_state() -> Any:
    """Return the state of `random`, for which Python makes 625 numbers."""
    generator: Any = getattr(random.getstate, "__self__", None)
    mark = (_memory(generator), dict(vars(generator))) if _IS_CPYTHON and type(generator) is random.Random else None
    return _python.state(mark, random.getstate)


def _numpy_state() -> Any:
    """Return the state of numpy's generator, which takes 80 µs to ask for; None where numpy is not imported."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    generator: Any = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    mark = None
    if _IS_CPYTHON and type(generator).__name__ == "MT19937":
        legacy = module.get_state.__self__  # it keeps the second of two normal numbers
        mark = ctypes.string_at(generator.ctypes.state_address, _BYTES), _memory(legacy)
    return _numpy.state(mark, partial(module.get_state, legacy=False))


def _memory(thing: Any) -> bytes:
    """Return the bytes of an object without its header."""
    header = object.__basicsize__
    return ctypes.string_at(id(thing) + header, type(thing).__basicsize__ - header)


def mark_of(generator: Any) -> Any:
    """Return a mark of a generator that a model has itself, which another state changes; None for any other object."""
    torch: Any = sys.modules["torch"]
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    module: Any = sys.modules.get("numpy.random")
    if module is not None and isinstance(generator, (module.Generator, module.RandomState)):
        return pickle.dumps(generator)
    return None
