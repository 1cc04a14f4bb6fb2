"""What the descriptions name is there in the libraries as they are installed, read from their source and not imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbguard.libraries import Library, libraries

_CLASSES = [
    (module, name)
    for library in libraries()
    for module, name in [
        *((module, each.name) for each in library.experiments for module in each.modules),
        *((loop, each.name) for each in library.experiments for loop in each.loops if each.fit),
        *(each.cancel for each in library.experiments if any(each.cancel)),
        *((module, name) for module, name, _ in library.kinds),
        *library.own_optimizers,
        *library.details,
        *([library.shared_state] if any(library.shared_state) else []),
        *(tuple(name.rsplit(".", 1)) for name in (*library.module_repairs, *library.output_repairs)),
    ]
]

_GONE = frozenset({"transformers.models.mamba.modeling_mamba.MambaCache"})
"""Classes of older versions, which nbguard knows still."""


@functools.cache
def _folder(package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # `make unit` runs without it
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed here")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """Return the names that a module defines or imports, and those of methods; fastai makes its exceptions by keywords."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(each.asname or each.name for each in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
    return frozenset(names)


def _files(path: str) -> Iterator[Path]:
    package, _, rest = path.strip("/").partition("/")
    yield from _folder(package).glob(f"{rest}*")


@pytest.mark.parametrize(("module", "name"), sorted(set(_CLASSES)))
def test_a_class_is_where_a_description_looks_for_it(module: str, name: str) -> None:
    package, *rest = module.split(".")
    place = _folder(package).joinpath(*rest)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")

    assert (name in _names(file)) != (f"{module}.{name}" in _GONE)


@pytest.mark.parametrize("library", [each for each in libraries() if each.work], ids=lambda library: library.name)
def test_a_librarys_work_is_in_its_files(library: Library) -> None:
    for work in library.work:
        files = list(_files(work.files[0]))
        assert files
        for function in filter(None, work.functions):
            name = function.rpartition(".")[2]
            assert any(any(one.endswith(name) for one in _names(file)) for file in files if file.suffix == ".py"), function
