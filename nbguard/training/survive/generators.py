"""The states of the generators of random numbers, so that a batch which runs again draws the same ones."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
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
        self._host = HostGenerators()
        generator = sys.modules["torch"].default_generator
        self._states = [(generator, generator.get_state())]
        for module in _devices():
            if module.is_initialized():
                generator = module.default_generators[module.current_device()]
                self._states.append((generator, generator.get_state()))

    def restore(self) -> bool:
        """Put them back; say whether any of them had moved."""
        has_moved = self._host.restore()
        for generator, state in self._states:
            has_moved |= not bool((generator.get_state() == state).all())
            generator.set_state(state)
        return has_moved


@cache
def _devices() -> list[Any]:
    """Return PyTorch's modules of the devices that this build can use and that have generators."""
    torch: Any = sys.modules["torch"]
    return [getattr(torch, kind) for kind in ("cuda", "xpu") if hasattr(torch, kind) and is_built_for(kind)]


def is_built_for(kind: str) -> bool:
    """Say whether this build of PyTorch supports a kind of device. A build that does not tell may."""
    torch: Any = sys.modules["torch"]
    return bool(getattr(torch._C, f"_has_{kind}", True))


# --- The host's two: to ask for their states takes up to 80 µs, to compare the memory that they lie in 2 µs.

_BYTES = 625 * 4
"""Bytes of a Mersenne twister: its words, and its place in them."""
_IS_CPYTHON = sys.implementation.name == "cpython"
"""Objects of CPython stay at the address that their id is."""


class _Asked:
    """The state of a generator as it was last asked for, and a mark of the memory that it lay in."""

    def __init__(self, ask: Callable[[], Any], memory: Any) -> None:
        self._ask, self._memory = ask, memory
        self._mark: object = None
        self._state: Any = None

    def state(self, other: object = None) -> Any:
        """Return the state; ask for it again where its memory has changed, or this other part of it."""
        mark = self._memory.raw, other
        if mark != self._mark:
            self._state, self._mark = self._ask(), mark
        return self._state


def _python_state() -> Any:
    """Return the state of `random`."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if not _IS_CPYTHON or type(generator) is not random.Random:
        return random.getstate()
    return _python(generator).state(vars(generator).get("gauss_next"))


def _numpy_state() -> Any:
    """Return the state of numpy's generator; None where numpy is not imported."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    if not _IS_CPYTHON or not hasattr(module, "get_bit_generator"):
        return module.get_state(legacy=False)
    legacy = module.get_state.__self__  # it leads to the twister, and keeps the second of two normal numbers
    asked = _numpy(_memory(legacy).raw)
    return asked.state() if asked is not None else module.get_state(legacy=False)


@lru_cache(maxsize=1)
def _python(generator: Any) -> _Asked:
    return _Asked(random.getstate, _memory(generator))


@lru_cache(maxsize=1)
def _numpy(_: bytes) -> _Asked | None:
    """Return the generator that the `RandomState` with these bytes leads to, unless it is another than numpy's own."""
    module = sys.modules["numpy.random"]
    twister = module.get_bit_generator()
    if type(twister).__name__ != "MT19937":
        return None
    return _Asked(partial(module.get_state, legacy=False), _bytes_at(twister.ctypes.state_address, _BYTES))


@lru_cache(maxsize=2)
def _memory(thing: Any) -> Any:
    """Return the bytes of an object without its header. The cache keeps it, so that they remain its own."""
    header = object.__basicsize__
    return _bytes_at(id(thing) + header, type(thing).__basicsize__ - header)


def _bytes_at(address: int, count: int) -> Any:
    return (ctypes.c_char * count).from_address(address)


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
