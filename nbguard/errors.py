"""Errors that nbguard raises on purpose. Every message says what to do next."""

from __future__ import annotations


class NbguardError(Exception):
    """Base of every error nbguard raises on purpose."""


class TargetError(NbguardError, ValueError):
    """A name given to `%reset_gpu` or `%gpumem why` cannot be used; nothing has been touched."""


class NoTorchError(NbguardError, RuntimeError):
    """PyTorch is not imported in this process, so there is nothing to look at yet."""

    def __init__(self) -> None:
        super().__init__(
            "PyTorch is not imported in this kernel yet: there is no memory to look at. Import torch, then run it again."
        )
