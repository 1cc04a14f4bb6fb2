"""Memory of the GPUs that other libraries of this process keep in pools of their own, as they count it.

Nothing is imported, and a library that has not used a GPU yet is not asked. Neither is a module of a library's name that is
no package: it was not installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nbguard.libraries import libraries
from nbguard.memory.core.facts import LibraryPool


def library_pools() -> dict[int, tuple[LibraryPool, ...]]:
    """Return the pools of other libraries by the index of their device, none where a library counts otherwise than known.

    To be asked once this process uses CUDA: CuPy's answer starts the driver, and processes forked later could not use it.
    """
    found: dict[int, tuple[LibraryPool, ...]] = {}
    for package, read in _READERS.items():
        # A version that counts otherwise: its memory counts as the context's.
        with contextlib.suppress(Exception):
            for index, pool in read() if _is_loaded(package) else ():
                if pool.held > 0:
                    known = next(each.pool for each in libraries() if each.name == pool.library)
                    whole = replace(pool, release=known.release, setting=known.setting)
                    found[index] = (*found.get(index, ()), whole)
    return found


def _is_loaded(package: str) -> bool:
    module = sys.modules.get(package)
    spec = None if type(module) is not ModuleType else module.__dict__.get("__spec__")
    return type(spec) is ModuleSpec and spec.submodule_search_locations is not None


def _global(module: str, name: str) -> Any:
    """Return a global of a loaded module; None if there is none."""
    loaded = sys.modules.get(module)
    return None if type(loaded) is not ModuleType else loaded.__dict__.get(name)


def _cupy() -> Iterator[tuple[int, LibraryPool]]:
    """Yield CuPy's default pool of the current device. The others' it tells only after a change of the device."""
    pool = _global("cupy", "_default_memory_pool")
    if pool is not None and (held := pool.total_bytes()):
        index = _global("cupy", "cuda").runtime.getDevice()
        yield index, LibraryPool(library="CuPy", held=held, used=pool.used_bytes())


def _jax() -> Iterator[tuple[int, LibraryPool]]:
    """Yield JAX's pools, one for each GPU that it uses."""
    backends = _global("jax._src.xla_bridge", "_backends") or {}
    for platform in ("cuda", "rocm", "gpu"):
        for device in backends[platform].local_devices() if platform in backends else ():
            stats = device.memory_stats() or {}
            used = stats.get("bytes_in_use", 0)
            held = stats.get("pool_bytes", used)
            pool = LibraryPool(library="JAX", held=held, used=used, is_whole="pool_bytes" in stats)
            yield device.local_hardware_id, pool


def _tensorflow() -> Iterator[tuple[int, LibraryPool]]:
    """Yield the bytes of TensorFlow's arrays on each GPU that it uses; of its pool it does not tell."""
    context = _global("tensorflow.python.eager.context", "_context")
    if context is None or context._context_handle is None:
        return
    for index in range(len(context.list_logical_devices("GPU"))):
        used = context.get_memory_info(f"GPU:{index}")["current"]
        yield index, LibraryPool(library="TensorFlow", held=used, used=used, is_whole=False)


_READERS = {"cupy": _cupy, "jax": _jax, "tensorflow": _tensorflow}
"""Readers by the package that must be loaded."""
