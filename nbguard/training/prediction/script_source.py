"""The source of a script that is to run up to its first fit, read before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from nbguard.errors import NbguardError
from nbguard.files import open_file, unreadable
from nbguard.spelling import did_you_mean

_INSTALLED = ("site-packages", "dist-packages")
_MADE_ANYHOW = re.compile(r"import\s*\*|__getattr__|\b(?:exec|globals|locals|setattr|vars)\b")
"""Code that may give a module names that are not written in it."""


def parsed(path: Path) -> ast.Module:
    """Return the tree of a script.

    Raises:
        NbguardError: the file cannot be read, or is no Python.
    """
    return _parsed(path)[0]


def is_installed(file: Path) -> bool:
    """Say whether a file is an installed package's."""
    return any(part in file.parts for part in _INSTALLED)


def is_script(spec: ModuleSpec | None) -> bool:
    """Say whether a module is a file of Python that no package has installed."""
    return spec is not None and str(spec.origin).endswith(".py") and not is_installed(Path(str(spec.origin)))


def refuse_wrong_target(target: str) -> None:
    """Raise NbguardError where a target is no `module:name`, its module is not there, or its source never names it.

    The current folder is put in front of `sys.path`, as the target's module is looked for there.
    """
    module, _, attribute = target.partition(":")
    if not attribute.isidentifier():
        raise NbguardError(f"{target} is not a target; name a module and an object in it, as in  nbguard doctor train:learn")
    name = module.removesuffix(".py")
    package = name.partition(".")[0]
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    if not package.isidentifier():
        raise NbguardError(f"{name} is not the name of a module: write it as in  nbguard doctor train:learn")
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or (name == package and spec.origin is None):  # a folder
        question = did_you_mean(package, (file.stem for file in Path.cwd().glob("*.py")))
        raise NbguardError(": ".join(filter(None, [f"there is no module {package}, in this folder or installed", question])))
    if name == package and is_script(spec):
        tree, text = _parsed(Path(str(spec.origin)))
        if not (re.search(rf"\b{attribute}\b", text) or _MADE_ANYHOW.search(text)):
            question = did_you_mean(attribute, _bound(tree))
            raise NbguardError(": ".join(filter(None, [f"{target} is not there: {spec.origin} has no {attribute}", question])))


def _parsed(path: Path) -> tuple[ast.Module, str]:
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8-sig")
        return ast.parse(text), text
    except OSError as error:
        raise NbguardError(unreadable(path, error)) from None
    except UnicodeDecodeError:
        raise NbguardError(f"{path} cannot be read because it is not UTF-8 text") from None
    except (SyntaxError, ValueError) as error:  # the latter of null bytes, before Python 3.12
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise NbguardError(f"{path} is not valid Python: {getattr(error, 'msg', error)}{where}") from None


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a script's functions, classes and assignments have."""
    nodes = [*ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
