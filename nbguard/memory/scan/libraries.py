"""The owner of a file of Python code, either an installed library or the user, and leaks of installed versions."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nbguard.libraries import KnownLeak, known_leaks, packages, shared_states
from nbguard.memory.scan.heap.kinds import loaded_class, module_namespace


def library_paths() -> tuple[str, ...]:
    """Return how the paths of libraries' files begin: a file from elsewhere is the user's own."""
    own = f"{Path(__file__).parents[2]}/"
    return (
        *_installed(),
        *(f"{folder}/" for folder in sys.path if folder and _holds_packages(folder)),
        *framework_folders(),
        own,
    )


def below_packages(file: str, frameworks: Sequence[str]) -> str:
    """Return the path of a library's file below the folder that its package is in: "torch/nn/modules/module.py".

    `frameworks`: `framework_folders()`, which may lie anywhere.
    """
    _, is_installed, place = file.rpartition("-packages/")
    if is_installed:
        return place
    folder = next((folder for folder in frameworks if file.startswith(folder)), "")
    return file[folder.rstrip("/").rfind("/") + 1 :] if folder else file


@cache
def _installed() -> frozenset[str]:
    """Return the folders of this Python: they stay where they are, and asking for them takes a millisecond."""
    return frozenset(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))


@cache
def _holds_packages(folder: str) -> bool:
    """Say whether packages have been installed in a folder: installers leave their records of each next to it."""
    if "-packages" in folder:
        return True
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:  # a zip archive, or no folder
        return False


def has_shared_state() -> bool:
    """Say whether a library's state is made that launched processes must make again: `notebook_launcher` looks at the same."""
    return any(getattr(loaded_class(*state), "_shared_state", None) for state in shared_states())


def known_leaks_of(labels: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (label, sentence) for each of these roots' labels that the installed version of its library is known for."""
    known = known_leaks()
    return tuple((label, leak.words) for label in labels for leak in known.get(label, ()) if _is_installed(leak))


def _is_installed(leak: KnownLeak) -> bool:
    from packaging.specifiers import SpecifierSet  # a profile, which knows libraries by this module, has no leak

    try:
        return SpecifierSet(leak.versions).contains(version(leak.package), prereleases=True)
    except (PackageNotFoundError, ValueError):
        return False


def framework_folders() -> list[str]:
    """Return the folders of the frameworks that are imported, wherever they were found.

    People train with them, and also run them from a checkout or a folder of `PYTHONPATH`: they are libraries there, too.
    """
    files = [(module_namespace(sys.modules.get(name)) or {}).get("__file__") for name in ("torch", *packages())]
    return [file.removesuffix("__init__.py") for file in files if type(file) is str and file.endswith("__init__.py")]
