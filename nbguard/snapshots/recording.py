"""The switch of the allocator's history, for scripts: what `%gpumem record on|off` does."""

from __future__ import annotations

from nbguard.cleanup.apply.allocator_history import start, stop
from nbguard.memory.recording import DEFAULT_ENTRIES, Recording


def record(on: bool = True, entries: int = DEFAULT_ENTRIES) -> Recording:
    """Keep PyTorch's history of its allocator from now on, bounded, or end that and forget it; say what is recorded then.

    Where CUDA is not in use yet, recording begins when it is: no context is opened for it. A history that somebody else
    records is left alone, by both.

    Args:
        on: keep it; False ends it.
        entries: how many to keep of each device, the latest.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: this PyTorch has no history that can be bounded.
    """
    return start(entries) if on else stop()
