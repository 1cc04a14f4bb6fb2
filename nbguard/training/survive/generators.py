"""The states of the generators of random numbers, so that a batch which runs again draws the same ones."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from typing import Any


class HostGenerators:
    """The states of Python's `random` and of numpy's generator at one moment; of the latter only where numpy is imported."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._numpy = _numpy_state()

    def restore(self) -> bool:
        """Put them back; say whether one of them had moved."""
        now = HostGenerators()
        random.setstate(self._random)
        if self._numpy is None:
            return now._random != self._random
        sys.modules["numpy.random"].set_state(self._numpy)
        return now._random != self._random or pickle.dumps(now._numpy) != pickle.dumps(self._numpy)


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


_BYTES = 625 * 4
"""Bytes of a Mersenne twister: its words, and its place in them."""
_known: tuple[bytes, Any] = (b"", None)
"""The bytes of numpy's generator when its state was last asked for, which takes 50 µs, and this state."""


def _numpy_state() -> Any:
    global _known
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    raw = _raw(module)
    if not raw or raw != _known[0]:
        _known = raw, module.get_state(legacy=False)
    return _known[1]


def _raw(module: Any) -> bytes:
    """Return the bytes of numpy's generator; none where it is another than numpy's own."""
    generator: Any = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)


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
