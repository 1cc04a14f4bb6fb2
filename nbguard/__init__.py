"""nbguard keeps GPU memory healthy between the experiments of a notebook.

`%load_ext nbguard` gives `%gpumem` (who holds the memory, and why) and `%reset_gpu` (say what a cleanup would give back,
then do it). The same from Python: `report`, `why`, `plan`, `release`. Importing nbguard imports neither torch nor IPython.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbguard.api import plan, release, report, why
    from nbguard.errors import NbguardError, NoTorchError, TargetError

__version__ = "0.1.0"
__all__ = ["NbguardError", "NoTorchError", "TargetError", "plan", "release", "report", "why"]


def __getattr__(name: str) -> Any:
    if name in ("plan", "release", "report", "why"):
        import nbguard.api as home
    elif name in ("NbguardError", "NoTorchError", "TargetError"):
        import nbguard.errors as home  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'nbguard' has no attribute {name!r}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: what `%load_ext nbguard` does."""
    from nbguard.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics out again and leave IPython as it was found."""
    from nbguard.magics import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "nbguard"}]
