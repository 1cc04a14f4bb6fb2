"""The IPython magics. Thin: parse, call the API, display. Nothing of nbguard's heavier parts is imported to register them."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from nbguard.magics.gpumem import GpuMemMagics
from nbguard.magics.reset_gpu import ResetGpuMagics

_CLASSES = (GpuMemMagics, ResetGpuMagics)


def load(shell: InteractiveShell) -> None:
    """Register the magics, and remember what they replace."""
    manager = shell.magics_manager
    for cls in _CLASSES:
        if cls.__name__ in manager.registry:
            continue
        magics = cls(shell)
        magics.replaced = {name: manager.magics["line"].get(name) for name in magics.magics["line"]}
        manager.register(magics)


def unload(shell: InteractiveShell) -> None:
    """Remove the magics and put back what they replaced."""
    manager = shell.magics_manager
    for cls in _CLASSES:
        magics = manager.registry.pop(cls.__name__, None)
        for name, former in ({} if magics is None else magics.replaced).items():
            if former is None:
                manager.magics["line"].pop(name, None)
            else:
                manager.magics["line"][name] = former
