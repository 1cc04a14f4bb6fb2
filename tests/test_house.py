"""The rules of the house, as far as a program can check them.

Where the tree does not keep a rule yet, the exception is listed here by name. A test fails when an exception is no longer
needed, so that the lists only shrink. Which room may import which is checked by import-linter (pyproject.toml).
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nbguard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nbguard"

MODULES_PER_FOLDER = 15
FIELDS_BY_POSITION = 4
ARGUMENTS_BY_POSITION = 7

# --- what is not as it should be yet: take a line out as soon as its test asks for it ---------------------------------------

TWO_MEANINGS: frozenset[str] = frozenset()
"""Public class names that more than one module defines."""

LARGE_FOLDERS: frozenset[str] = frozenset()
"""Folders of more than MODULES_PER_FOLDER modules."""

CIRCLES: frozenset[str] = frozenset()
"""Modules that import each other, the names of one circle joined by " <-> "."""

NO_ADVICE = frozenset({"<%reset_gpu>", "<released by %reset_gpu: "})
"""Texts with the name of a magic that nobody is told to run: the file of a compiled line, the `repr` of a stand-in."""

UNTESTED_ROOMS = frozenset({"cells", "notebook"})
"""Rooms without a folder of tests of the same name: tests/kernel has theirs, in real kernels."""


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules, by the modules' names."""
    trees = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_bytes())
    return trees


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of one kind, with the name of its module."""
    for module, tree in sources().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, kind))


def keyword_only(decorators: list[ast.expr]) -> bool | None:
    """Say whether a class is a dataclass built by keyword; None where it is no dataclass."""
    for decorator in decorators:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(call) in ("dataclass", "dataclasses.dataclass"):
            words = decorator.keywords if isinstance(decorator, ast.Call) else []
            return any(word.arg == "kw_only" and ast.unparse(word.value) == "True" for word in words)
    return None


def imports() -> dict[str, set[str]]:
    """Return the modules of nbguard that each module imports, inside of functions and under TYPE_CHECKING, too."""
    graph: dict[str, set[str]] = {name: set() for name in sources()}
    for name, node in nodes(ast.Import):
        assert isinstance(node, ast.Import)
        graph[name].update(alias.name for alias in node.names if alias.name in graph)
    for name, node in nodes(ast.ImportFrom):
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 0, f"{name} has a relative import"
        for alias in node.names:
            target = f"{node.module}.{alias.name}"
            graph[name].update({target if target in graph else str(node.module)} & graph.keys())
    return {name: targets - {name} for name, targets in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        left = [start]
        while left:
            for target in graph[left.pop()] - seen:
                seen.add(target)
                left.append(target)
        reached[start] = seen
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]}
    return sorted(map(set, groups), key=min)


def check(broken: set[str], exceptions: frozenset[str]) -> None:
    """Assert that a rule is broken where the list of exceptions says so, and nowhere else."""
    assert broken - exceptions == set(), "the rule is new to these"
    assert exceptions - broken == set(), "these keep the rule now: take them off the list of exceptions"


def test_a_public_class_name_has_one_meaning() -> None:
    homes = defaultdict(list)
    for module, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)

    check({name for name, modules in homes.items() if len(modules) > 1}, TWO_MEANINGS)


def test_no_call_has_a_row_of_arguments_by_position() -> None:
    long = []
    for module, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if len(node.args) > ARGUMENTS_BY_POSITION:
            long.append(f"{module}:{node.lineno} {ast.unparse(node.func)}")

    assert long == []


def test_dataclasses_of_many_fields_are_built_by_keyword() -> None:
    by_position = []
    for module, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        fields = [
            each
            for each in node.body
            if isinstance(each, ast.AnnAssign) and not ast.unparse(each.annotation).startswith("ClassVar")
        ]
        if keyword_only(node.decorator_list) is False and len(fields) > FIELDS_BY_POSITION:
            by_position.append(f"{module}.{node.name} has {len(fields)} fields")

    assert by_position == []


def test_folders_are_small() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in [PACKAGE, *PACKAGE.rglob("*/")]}

    large = {folder.relative_to(ROOT).as_posix() for folder, count in counts.items() if count > MODULES_PER_FOLDER}
    check(large, LARGE_FOLDERS)


def test_no_room_has_the_name_of_something_public() -> None:
    """`import nbguard.report` would put a module where `nbguard.report()` was."""
    names = {*nbguard.__all__, "FitMonitor", "Sidebar"}

    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names & modules == set()


def test_no_modules_import_each_other() -> None:
    check({" <-> ".join(sorted(group)) for group in circles(imports())}, CIRCLES)


def test_a_circle_is_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}

    assert circles(graph) == [{"b", "c"}]


def test_every_room_has_its_tests() -> None:
    rooms = {path.parent.name for wing in ("memory", "training", "frontend") for path in PACKAGE.glob(f"{wing}/*/__init__.py")}
    rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"memory", "training", "frontend"}

    tested = {folder.name for folder in (ROOT / "tests").iterdir() if folder.is_dir() and any(folder.rglob("test_*.py"))}
    check(rooms - tested, UNTESTED_ROOMS)


def test_commands_are_made_in_one_module() -> None:
    """Every line that is advised is an `Advice`; how a magic is used ("as in  %reset_gpu learn") is no advice."""
    commands, usage = ("%reset_gpu", "%gpumem", "%nbguard", ".cache_clear()"), ("as in  %", "is freed by  %")
    strays = []
    for module, tree in sources().items():
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if module == "nbguard.memory.core.advice" or module.startswith("nbguard.frontend.notebook.") or id(node) in prose:
                continue
            text = node.value if isinstance(node, ast.Constant) and type(node.value) is str else ""
            is_name = text.startswith("<") or text == "%reset_gpu"  # of code that a cleanup compiles, or a placeholder
            if any(command in text for command in commands) and not is_name and not any(word in text for word in usage):
                strays.append(f"{module}:{node.lineno} {text}")

    assert strays == []


def at_import(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that run when a module is imported: outside functions, their decorators and defaults included."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Call):
                yield node


def test_no_test_makes_tensors_when_it_is_imported() -> None:
    """They would live as long as pytest, and every test that counts the tensors of its process would count them."""
    harmless = ("torch.library.custom_op", "torch.cuda.is_available", "torch.get_num_threads", "torch.device")
    strays = []
    programs = [ROOT / "tests" / "lint" / "cases", ROOT / "tests" / "survey" / "cells"]  # run by themselves, and never imported
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file.parent in programs:
            continue
        for call in at_import(ast.parse(file.read_bytes())):
            name = ast.unparse(call.func)
            if name.startswith(("torch.", "nn.")) and name not in harmless:
                strays.append(f"{file.relative_to(ROOT)}:{call.lineno} {name}")

    assert strays == []


def test_commands_are_made_in_one_place() -> None:
    """A magic, or its option, in a sentence elsewhere would be shown where there are no magics. Only a notebook may say one."""
    said = re.compile(r"%(?:gpumem|reset_gpu|nbguard|%?profile_fit)\b|-n shows more|Jupyter starts")
    makers = {"nbguard.memory.core.advice", "nbguard.texts"}
    terminal = ("nbguard.frontend.arguments", "nbguard.frontend.cli")  # it names files that magics have written
    rooms = ("nbguard.frontend.notebook", *terminal)
    docstrings = {id(node.value) for _, node in nodes(ast.Expr) if isinstance(node, ast.Expr)}
    found = {
        (module, node.value)
        for module, node in nodes(ast.Constant)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if said.search(node.value) and module not in makers and not module.startswith(rooms)
    }

    assert {text for _, text in found} == NO_ADVICE, found
