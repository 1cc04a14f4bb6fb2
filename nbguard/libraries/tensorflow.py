"""TensorFlow, which takes nearly all of a GPU when it first uses it."""

from __future__ import annotations

from nbguard.libraries import DevicePool, Library

LIBRARY = Library(
    name="TensorFlow",
    packages=("tensorflow", "keras"),
    pool=DevicePool(setting="TF_FORCE_GPU_ALLOW_GROWTH=true"),
)
