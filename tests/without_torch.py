"""pytest plugin of `make unit`: the tests that need neither PyTorch nor a kernel, in a process that cannot import PyTorch.

A test module belongs to them of itself, by what it imports: nothing marks or lists it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

BLOCKED = frozenset({"accelerate", "fastai", "jupyterlab", "matplotlib", "nbclient", "numpy", "playwright", "torch"})
"""Packages that the extra `unit` of pyproject.toml does not install."""

WHOLE = frozenset({"benchmarks", "cuda", "fake_cuda", "gpu", "kernel", "notebooks", "ui", "zoo"})
"""Folders of tests of whole kernels, browsers and devices."""

PROCESSES = frozenset(
    {
        "fake_cuda_kernel",
        "fake_cuda_library",
        "fake_cuda_run",
        "fastai_zygote",
        "kernel",
        "plain_kernel",
        "plain_zygote",
        "torch_process",
    }
)
"""Fixtures that start kernels and other processes in which PyTorch is imported."""


class Blocker:
    """A finder of modules that refuses the blocked packages, as an environment without them would."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}: `make unit` runs without it", name=name)


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    """Return the modules that a file imports when it is imported itself, and `module.name` for each name taken from one."""
    names: list[str] = []
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(names)


@functools.cache
def file_of(name: str) -> Path | None:
    """Return the file of a module of nbguard or its tests; None for any other module, and for a name inside of a module."""
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def needs_blocked(file: Path) -> bool:
    """Say whether importing a file leads to a blocked package, by way of any module of nbguard or its tests."""
    seen, left = {file}, [file]
    while left:
        for name in imports(left.pop()):
            if name.partition(".")[0] in BLOCKED:
                return True
            if name.startswith(("nbguard", "tests")) and (known := file_of(name)) and known not in seen:
                seen.add(known)
                left.append(known)
    return False


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.is_dir():
        return True if collection_path.parent.name == "tests" and collection_path.name in WHOLE else None
    return True if collection_path.name.startswith("test_") and needs_blocked(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other processes and slow ones."""
    left_out = [item for item in items if PROCESSES & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


if "torch" in sys.modules:
    raise pytest.UsageError("PyTorch was imported before tests.without_torch could keep it out")
sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]
