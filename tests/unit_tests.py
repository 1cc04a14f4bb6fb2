"""Which tests need neither PyTorch nor a kernel: those of `make unit` (`without_torch.py`). CI has the rest (`with_torch.py`).

A test module belongs to them of itself, by what it imports: nothing marks or lists it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCKED = frozenset({"accelerate", "fastai", "jupyterlab", "matplotlib", "mcp", "nbclient", "numpy", "playwright", "torch"})
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
        "torch_zygote",
    }
)
"""Fixtures that start kernels and other processes in which PyTorch is imported."""


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


@functools.cache
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


def may_be_unit(path: Path) -> bool | None:
    """Say whether tests of a file or folder may be of `make unit`; None for what decides nothing."""
    if path.is_dir():
        return False if path.parent.name == "tests" and path.name in WHOLE else None
    return not needs_blocked(path) if path.name.startswith("test_") else None


def is_unit(item: pytest.Item) -> bool:
    """Say whether a test of such a file is of `make unit`: it starts no process with PyTorch in it, and is not slow."""
    return not (PROCESSES & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("slow"))
