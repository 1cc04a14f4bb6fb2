"""Memory of the GPUs that other libraries of this process keep in pools of their own, as they count it.

Nothing is imported, and a library that has not used a GPU yet is not asked. Neither is a module of a library's name that is
no package: it was not installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

from nbguard.libraries import libraries
from nbguard.memory.core.facts import DeviceFacts, LibraryPool

_Reading: TypeAlias = tuple[int, int, int | None]
"""(index of the device, bytes of the arrays, bytes of the pool or None where the library does not tell them)."""


def with_library_pools(devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Return the facts on devices with the pools of other libraries, none where a library counts otherwise than known.

    To be asked once this process uses CUDA, as CuPy's answer starts the driver, and forked processes could not use it then.
    """
    pools: dict[str, list[LibraryPool]] = {}
    for package, read in _READERS.items():
        # Memory that a version counts otherwise is the context's.
        with contextlib.suppress(Exception):
            for index, used, held in read() if _is_loaded(package) else ():
                pool = _pool(package, used, held)
                if pool.held > 0:
                    pools.setdefault(f"cuda:{index}", []).append(pool)
    return tuple(replace(facts, library_pools=tuple(pools.get(facts.device, ()))) if pools else facts for facts in devices)


def _pool(package: str, used: int, held: int | None) -> LibraryPool:
    library = next(each for each in libraries() if package in each.packages)
    return LibraryPool(
        library=library.name,
        held=used if held is None else held,
        used=used,
        is_whole=held is not None,
        release=library.pool.release,
        setting=library.pool.setting,
    )


def _is_loaded(package: str) -> bool:
    module = sys.modules.get(package)
    spec = None if type(module) is not ModuleType else module.__dict__.get("__spec__")
    return type(spec) is ModuleSpec and spec.submodule_search_locations is not None


def _global(module: str, name: str) -> Any:
    """Return a loaded module's global, or None."""
    loaded = sys.modules.get(module)
    return None if type(loaded) is not ModuleType else loaded.__dict__.get(name)


def _cupy() -> Iterator[_Reading]:
    """Yield CuPy's default pool of the current device. CuPy tells the others only after a change of the device."""
    pool = _global("cupy", "_default_memory_pool")
    if pool is not None and (held := pool.total_bytes()):
        yield _global("cupy", "cuda").runtime.getDevice(), pool.used_bytes(), held


def _jax() -> Iterator[_Reading]:
    """Yield JAX's pools, one for each GPU that it uses."""
    backends = _global("jax._src.xla_bridge", "_backends") or {}
    for platform in ("cuda", "rocm", "gpu"):
        for device in backends[platform].local_devices() if platform in backends else ():
            stats = device.memory_stats() or {}
            yield device.local_hardware_id, stats.get("bytes_in_use", 0), stats.get("pool_bytes")


def _tensorflow() -> Iterator[_Reading]:
    """Yield the bytes of TensorFlow's arrays on each GPU that it uses. It does not tell those of its pool."""
    context = _global("tensorflow.python.eager.context", "_context")
    if context is None or context._context_handle is None:
        return
    for index in range(len(context.list_logical_devices("GPU"))):
        yield index, context.get_memory_info(f"GPU:{index}")["current"], None


_READERS = {"cupy": _cupy, "jax": _jax, "tensorflow": _tensorflow}
"""Readers by the package that must be loaded."""
