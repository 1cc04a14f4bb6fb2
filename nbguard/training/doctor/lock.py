"""The exact versions of the packages that notebooks and scripts import, as requirements that make this environment again."""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nbguard.errors import NbguardError, in_one_line
from nbguard.files import read_file, unreadable
from nbguard.plain_data import read_json
from nbguard.texts import printable

_LARGEST = 100 * 1024**2
"""Bytes of a notebook or a script."""
_INDEX = "https://download.pytorch.org/whl/"
"""PyTorch's own index of wheels; its folders are called as the local part of a version: `2.13.0+cu130` is in `cu130`."""


def lock_of(sources: Iterable[str] = (), *, conda: bool = False) -> str:
    """Return requirements, a line for each package, with the index of PyTorch's build by name.

    Args:
        sources: notebooks and Python files, whose imports are listed with all that they need. None for all installed packages.
        conda: whether to return an environment.yml, of this Python, where pip installs them.

    Raises:
        NbguardError: a file cannot be read, or imports something that is not installed here.
    """
    files = [Path(source) for source in sources]
    modules = {module for file in files for module in _modules_of(file)}
    named = set(_packages_of(modules)) if files else {_name(each) for each in distributions()}
    needed = sorted(_with_needs(named))
    builds = sorted({version.partition("+")[2] for _, version in needed if "+" in version} - {""})
    made = f"# Made by nbguard lock, with Python {platform.python_version()}" + (
        f", of {', '.join(printable(str(file)) for file in files)}" if files else ""
    )
    lines = [*(f"--extra-index-url {_INDEX}{build}" for build in builds), *(f"{name}=={version}" for name, version in needed)]
    if conda:
        lines = [
            f"name: {re.sub('[^a-zA-Z0-9_-]', '-', files[0].stem) if files else 'nbguard'}",
            "channels: [conda-forge]",
            "dependencies:",
            f"  - python={platform.python_version()}",
            "  - pip",
            *(["  - pip:", *(f'      - "{line}"' for line in lines)] if lines else []),
        ]
    return "\n".join([made, *lines]) + "\n"


def _with_needs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, version) of packages and of all that they need in turn."""
    left, seen = list(names), set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform, or an extra that is not installed
        yield name, found.version
        needs = map(Requirement, found.requires or ())
        left += [canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _name(found: Distribution) -> str:
    return canonicalize_name(found.metadata["Name"])


def _modules_of(file: Path) -> set[str]:
    """Return the modules that a notebook or a script imports."""
    try:
        return _imports(_source(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NbguardError(f"{file} cannot be read: {in_one_line(error)}") from None


def _packages_of(modules: Iterable[str]) -> Iterator[str]:
    """Yield the installed packages that have these modules."""
    known = _packages_by_module()
    for module in modules:
        yield from map(canonicalize_name, known.get(module, ()))


def _packages_by_module() -> Mapping[str, Iterable[str]]:
    """Return the installed packages that have each top-level module."""
    known = packages_distributions()
    if sys.version_info >= (3, 11):
        return known
    packages = defaultdict(set, {module: set(names) for module, names in known.items()})
    for each in distributions():  # Python 3.10 knows only the packages that list their modules
        for file in each.files or ():
            if file.suffix == ".py":
                packages[file.parts[0] if len(file.parts) > 1 else file.stem].add(_name(each))
    return packages


def _imports(source: str) -> set[str]:
    """Return the top-level modules that a source imports, in functions, too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _source(file: Path) -> str:
    """Return the Python of a file; of a notebook its cells, without magics and shell commands."""
    try:
        text = read_file(file, _LARGEST).decode("utf-8")
        if file.suffix != ".ipynb":
            return text
        sources = ["".join(cell["source"]) for cell in read_json(text)["cells"] if cell["cell_type"] == "code"]
    except OSError as error:
        raise NbguardError(unreadable(file, error)) from None
    except (ValueError, KeyError, TypeError):
        raise NbguardError(f"{file} is not a notebook") from None
    return "\n".join(line for source in sources for line in _python_of(source))


def _python_of(cell: str) -> list[str]:
    """Return a cell's lines of Python: an extension of `%load_ext` as an import, no other magic."""
    lines = []
    for line in cell.splitlines():
        name = line.removeprefix("%load_ext ").strip()
        if name != line.strip() and name.replace(".", "_").isidentifier():
            lines.append(f"import {name}")
        elif not line.lstrip().startswith(("%", "!", "?")):
            lines.append(line)
    return lines
