"""CuPy, whose arrays lie in a pool of its own on the GPU."""

from __future__ import annotations

from nbguard.libraries import DevicePool, Library

LIBRARY = Library(
    name="CuPy",
    packages=("cupy", "cupyx", "cupy_backends"),
    pool=DevicePool(release="import cupy; cupy.get_default_memory_pool().free_all_blocks()"),
)
