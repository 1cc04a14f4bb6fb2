"""The IPython magics, which parse, call the API and display. Nothing of nbguard's heavier parts is imported for that."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from nbguard.frontend.notebook.listeners.completion import add_completion, remove_completion
from nbguard.frontend.notebook.magics.command_line import help_of_word
from nbguard.frontend.notebook.magics.gpumem import GpuMemMagics
from nbguard.frontend.notebook.magics.profile_fit import ProfileFitMagics, as_line
from nbguard.frontend.notebook.magics.reset_gpu import ResetGpuMagics
from nbguard.frontend.notebook.magics.switch import SwitchMagics
from nbguard.frontend.notebook.session import close, session_of

_CLASSES = (GpuMemMagics, ProfileFitMagics, ResetGpuMagics, SwitchMagics)
_KINDS = ("line", "cell")
_TRANSFORMERS = (as_line, help_of_word)


def load(shell: InteractiveShell) -> None:
    """Register the magics, and remember the replaced ones; watch cells' leftovers and failures; answer sidebars."""
    session_of(shell).watch()
    manager = shell.magics_manager
    for cls in _CLASSES:
        if cls.__name__ in manager.registry:
            continue
        magics = cls(shell)
        magics.replaced = {(kind, name): manager.magics[kind].get(name) for kind in _KINDS for name in magics.magics[kind]}
        manager.register(magics)
    add_completion(shell)
    transformers = shell.input_transformers_cleanup
    transformers += [transformer for transformer in _TRANSFORMERS if transformer not in transformers]


def unload(shell: InteractiveShell) -> None:
    """Remove the magics and put back the replaced ones; take every hook off."""
    close(shell)
    remove_completion(shell)
    manager = shell.magics_manager
    for cls in _CLASSES:
        magics = manager.registry.pop(cls.__name__, None)
        for (kind, name), former in ({} if magics is None else magics.replaced).items():
            if former is None:
                manager.magics[kind].pop(name, None)
            else:
                manager.magics[kind][name] = former
    for transformer in _TRANSFORMERS:
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
