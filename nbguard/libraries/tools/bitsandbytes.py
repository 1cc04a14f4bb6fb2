"""bitsandbytes, with optimizers in 8 bits and layers in 4 and 8."""

from __future__ import annotations

from nbguard.libraries import KnownLeak, Library

LIBRARY = Library(
    name="bitsandbytes",
    packages=("bitsandbytes",),
    distributions=("bitsandbytes",),
    known_leaks=(
        KnownLeak(
            package="bitsandbytes",
            versions=">=0.45",
            holder="bitsandbytes.optim.optimizer.GlobalOptimManager",
            keeps="each embedding that it was told to train in 32 bits",
            report="docs/guide/known-leaks.md has a reproduction",
        ),
    ),
)
