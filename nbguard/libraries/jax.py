"""JAX, which takes most of a GPU when it first uses it."""

from __future__ import annotations

from nbguard.libraries import DevicePool, Library

LIBRARY = Library(
    name="JAX",
    packages=("jax", "jaxlib"),
    pool=DevicePool(setting="XLA_PYTHON_CLIENT_PREALLOCATE=false"),
)
