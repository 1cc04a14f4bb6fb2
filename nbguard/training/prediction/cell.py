"""The fits of a cell that has not run, found in its source by its statements and names. No line runs on the user's objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from nbguard.cell_names import names_of
from nbguard.errors import NbguardError, UnpredictableError
from nbguard.memory.scan.learners import is_learner
from nbguard.memory.scan.targets import lookup
from nbguard.training.prediction.fits.first_batch import first_batch
from nbguard.training.prediction.fits.fit import FitSource
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.fits.sources import is_of, source_of
from nbguard.training.prediction.fits.step_fit import StepSource

# --- The loops of a script that train, found in its source, and marked so that the script can be stopped in front of them.


REACHED, FEW, GOES_ON = "__nbguard_reached__", "__nbguard_few__", "__nbguard_goes_on__"
"""Names that marked code calls: before a loop that trains; around any loop's iterable; in the condition of any `while`."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.While)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLoop:
    """A loop that trains and is in no other one of its function."""

    statements: list[ast.stmt]  # the loop, marked, and the code that it needs before
    text: str  # its first line
    line: int
    function: str  # of it; empty for the script's own lines
    file: str


@dataclass(slots=True)
class Loops:
    """The loops that train, of a script and of the files beside it."""

    folder: Path
    functions: set[str] = field(default_factory=set)  # names of functions that train
    methods: set[str] = field(default_factory=set)  # names of methods that train
    marked: list[MarkedLoop] = field(default_factory=list)

    @classmethod
    def of(cls, tree: ast.Module, folder: Path) -> Loops:
        """Return a script's loops that train, with the names of functions that train, in it and in its folder's modules."""
        own = cls(folder)
        trees = [tree, *_imported(tree, folder, set())]
        defined = [each for one in trees for each in _defined(one)]
        size = -1
        while size != len(own.functions) + len(own.methods):
            size = len(own.functions) + len(own.methods)
            for function, is_method in defined:
                if own.trains(function):
                    (own.methods if is_method else own.functions).add(function.name)
        return own

    def trains(self, node: ast.AST) -> bool:
        """Say whether a backward pass runs in it: there, or in a function of the user's that it calls."""
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            called = call.func
            if isinstance(called, ast.Name) and called.id in self.functions:
                return True
            if isinstance(called, ast.Attribute):
                is_modules = called.attr in ("train", "eval") and not (call.args or call.keywords)  # a module's own
                if called.attr == "backward" or (called.attr in self.methods and not is_modules):
                    return True
        return False

    def mark(self, tree: ast.Module, file: str) -> ast.Module:
        """Return a tree with its loops marked."""
        marked: ast.Module = ast.fix_missing_locations(_Marker(self, file).visit(tree))
        return marked


class _Marker(ast.NodeTransformer):
    def __init__(self, loops: Loops, file: str) -> None:
        self._loops, self._file = loops, file
        self._function = ""
        self._is_inside = False  # a loop that trains
        self._whiles = 0

    def visit_FunctionDef(self, node: Any) -> Any:
        former = self._function, self._is_inside
        self._function, self._is_inside = node.name, False
        self.generic_visit(node)
        self._function, self._is_inside = former
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the visitor's names

    def visit_For(self, node: ast.For) -> Any:
        text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
        is_outermost = self._enter(node)
        node.iter = ast.Call(ast.Name(FEW, ast.Load()), [node.iter], [])
        return self._leave([node], text, is_outermost=is_outermost)

    def visit_While(self, node: ast.While) -> Any:
        text = f"while {ast.unparse(node.test)}:"
        is_outermost = self._enter(node)
        self._whiles += 1
        name = f"{GOES_ON}{self._whiles}"
        before = ast.Assign([ast.Name(name, ast.Store())], ast.Call(ast.Name(GOES_ON, ast.Load()), [], []))
        node.test = ast.BoolOp(ast.And(), [ast.Call(ast.Name(name, ast.Load()), [], []), node.test])
        return self._leave([ast.copy_location(before, node), node], text, is_outermost=is_outermost)

    def _enter(self, node: ast.For | ast.While) -> bool:
        is_outermost = not self._is_inside and self._loops.trains(node)
        self._is_inside |= is_outermost
        self.generic_visit(node)
        return is_outermost

    def _leave(self, statements: list[ast.stmt], text: str, *, is_outermost: bool) -> list[ast.stmt]:
        if not is_outermost:
            return statements
        self._is_inside = False
        line = statements[-1].lineno
        marked = self._loops.marked
        names = [ast.Call(ast.Name(name, ast.Load()), [], []) for name in ("globals", "locals")]
        stop = ast.Expr(ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(len(marked)), *names], []))
        marked.append(MarkedLoop(statements=statements, text=text, line=line, function=self._function, file=self._file))
        return [ast.copy_location(stop, statements[-1]), *statements]


def _defined(tree: ast.Module) -> Iterator[tuple[Any, bool]]:
    """Yield (function, whether it is a method) of all that a file defines."""
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    yield from ((node, id(node) in methods) for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _imported(tree: ast.Module, folder: Path, seen: set[Path]) -> Iterator[ast.Module]:
    """Yield the files beside a script that it imports, and that these import."""
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in filter(None, names):
            for path in (
                folder.joinpath(*name.split(".")).with_suffix(".py"),
                folder.joinpath(*name.split("."), "__init__.py"),
            ):
                if path not in seen and path.is_file():
                    seen.add(path)
                    try:
                        own = ast.parse(path.read_text(encoding="utf-8"))
                    except (OSError, SyntaxError, UnicodeDecodeError):
                        continue  # its import will say it
                    yield own
                    yield from _imported(own, folder, seen)


# --- Statements as functions, and the names in them.


def as_function(
    statements: list[ast.stmt],
    namespace: dict[str, Any],
    arguments: tuple[str, ...] = (),
    *,
    name: str = "the_cell",
    file: str = "<cell>",
) -> FunctionType:
    """Return statements as a function whose names are those of a namespace, as they are in a cell.

    Args:
        statements: of a cell or a script. None of them runs.
        namespace: its globals.
        arguments: names of the function's arguments; all other names that the statements bind are the namespace's.
        name: of the function.
        file: of the statements.

    Raises:
        SyntaxError: they belong to a function and cannot stand in another: a variable is that of a function around it.
    """
    bound = sorted(set().union(*map(names_bound, statements)) - set(arguments))
    body: list[ast.stmt] = [ast.Global(bound)] if bound else []
    given = [ast.arg(argument) for argument in arguments]
    signature = ast.arguments(posonlyargs=[], args=given, kwonlyargs=[], kw_defaults=[], defaults=[])
    function = ast.FunctionDef(name, signature, [*body, *statements], [])
    if "type_params" in function._fields:  # Python 3.12
        vars(function)["type_params"] = []
    module = ast.fix_missing_locations(ast.Module([function], []))
    names: dict[str, Any] = {}
    exec(compile(module, file, "exec"), names)  # noqa: S102 - this defines a function and runs nothing of it
    own: FunctionType = names[name]
    return FunctionType(own.__code__, namespace, name)


def names_bound(statement: ast.AST) -> frozenset[str]:
    """Return the names that a statement binds or deletes in the notebook; a function's own are its own."""
    names = names_of(statement)
    return names.bound | names.deleted


def names_read(node: ast.AST) -> frozenset[str]:
    """Return the names of the notebook whose values a statement asks for."""
    return names_of(node).read


_FITS = ("fit", "fit_one_cycle", "fit_flat_cos", "fit_sgdr", "fine_tune", "lr_find")
_CHANGES = ("add_cb", "add_cbs", "freeze", "freeze_to", "remove_cb", "to_bf16", "to_fp16", "to_fp32", "unfreeze")
"""Methods of a Learner that change its next fit: the copy is changed likewise."""
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
_BATCH = "_nbguard_batch"
_COUNTS = ("range", "len", "zip", "map")
"""Wrappers of a loader that yield something else than its batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFit:
    """A fit that a cell would start."""

    text: str  # `line 3: learn.fit(2)`
    source: FitSource
    code: str = ""  # lines that change the copy of the Learner, `learn`, before


def fits_of_cell(source: str, namespace: dict[str, Any]) -> tuple[CellFit, ...]:
    """Return the fits that a cell with this source would start, in their order.

    Args:
        source: Python, as IPython has transformed it.
        namespace: the user's names, which are read.

    Raises:
        NbguardError: it is no Python, it starts no fit, or it makes the fitted objects itself.
        UnpredictableError: a fit cannot be predicted; the message says why.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NbguardError(f"the cell is not valid Python: {error.msg}, line {error.lineno}") from None
    fits = tuple(_CellReader(namespace).read(tree.body))
    if not fits:
        raise NbguardError(
            "the cell starts no fit that can be predicted; it has no fit() of a Learner and no loop with backward()"
        )
    return fits


@dataclass(slots=True)
class _CellReader:
    """Reads a cell from its first statement to its last."""

    namespace: dict[str, Any]
    bound: set[str] = field(default_factory=set)  # names that the cell binds up to here
    before: list[ast.stmt] = field(default_factory=list)  # assignments and imports up to here
    changes: dict[int, list[str]] = field(default_factory=dict)  # by the id of a Learner: lines that change it

    def read(self, statements: list[ast.stmt]) -> Iterator[CellFit]:
        """Yield the fits of these statements."""
        for statement in statements:
            if isinstance(statement, ast.For) and _trains(statement) and not any(map(_has_training_loop, statement.body)):
                yield self._loop(statement)
            elif isinstance(statement, (ast.For, ast.While, ast.With, ast.If, ast.Try)):
                yield from self.read(statement.body)
            elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
                for call in sorted(calls, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0)):
                    yield from self._call(call)
                if isinstance(statement, _SIMPLE):
                    self.before.append(statement)
            self.bound |= names_bound(statement)

    def _value(self, node: ast.expr) -> Any:
        """Return the present object of an expression, or None if there is none or the cell makes it first."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            return self._value(node.func.value)  # learn.to_fp16().fit(1)
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if not names or names & self.bound or not names <= self.namespace.keys():
            return None
        try:
            return lookup(node, self.namespace)
        except NbguardError:
            return None

    def _call(self, call: ast.Call) -> Iterator[CellFit]:
        if not isinstance(call.func, ast.Attribute):
            return
        owner, method, text = call.func.value, call.func.attr, f"line {call.lineno}: {ast.unparse(call):.80}"
        value = self._value(owner)
        if method in _FITS and isinstance(owner, ast.Name) and (owner.id in self.bound or owner.id not in self.namespace):
            raise NbguardError(f"the cell makes {owner.id} itself; run the lines that make it, then predict its fit")
        if is_learner(value):
            changes = self.changes.setdefault(id(value), [])
            if method in _CHANGES:
                changes.append(
                    ast.unparse(
                        ast.Call(ast.Attribute(ast.Name("learn", ast.Load()), method, ast.Load()), call.args, call.keywords)
                    )
                )
            elif method in _FITS:
                source = replace(LearnerSource.of(value, None), names=self.namespace)
                states = ("freeze", "unfreeze") if method == "fine_tune" else ("",)
                for state in states:
                    code = "\n".join((*changes, *([f"learn.{state}()"] if state else ())))
                    yield CellFit(text=f"{text}, after {state}()" if state else text, source=source, code=code)
        elif method == "train" and is_of(value, "transformers", "Trainer"):
            yield CellFit(text=text, source=source_of(value, None, None))
        elif method == "fit" and any(is_of(value, package, "Trainer") for package in ("lightning", "pytorch_lightning")):
            module, loader = (*map(self._value, call.args[:2]), None, None)[:2]
            if module is None or loader is None:
                raise UnpredictableError(f"{text}: give the module and the loader by position, and make both before this cell")
            yield CellFit(text=text, source=source_of(module, first_batch(loader), None))

    def _loop(self, loop: ast.For) -> CellFit:
        """Return the fit that a loop over batches is: its body as a step, on a copy of all that it refers to."""
        text = f"line {loop.lineno}: for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}:"
        place = next((node for node in ast.walk(loop.iter) if self._is_loader(node)), None)
        if place is None:
            raise UnpredictableError(f"{text} iterates over no existing loader; give its body as a step function")
        loader = self._value(place)  # type: ignore[arg-type] # `_is_loader` has looked
        body = ast.For(loop.target, _one_round(loop.iter, place, text), loop.body, [])
        step = as_function([body], self.namespace, (_BATCH,))
        needed = _needed(self.before, names_read(loop))
        prepare = as_function(needed, self.namespace) if needed else None
        return CellFit(text=text, source=StepSource.of(step, first_batch(loader), prepare))

    def _is_loader(self, node: ast.AST) -> bool:
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return False
        value = self._value(node)
        return value is not None and hasattr(type(value), "__iter__") and hasattr(value, "dataset")


def _trains(node: ast.AST) -> bool:
    """Say whether `backward()` is called in it."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "backward" for called in calls)


def _one_round(iterated: ast.expr, loader: ast.AST, text: str) -> ast.expr:
    """Return a loop's iterable with one batch in the place of its loader; of the wrappers around it only a count is kept."""
    if iterated is loader:
        return ast.List([ast.Name(_BATCH, ast.Load())], ast.Load())
    if isinstance(iterated, ast.Call):
        name = iterated.func.attr if isinstance(iterated.func, ast.Attribute) else getattr(iterated.func, "id", "")
        inner = next((each for each in (iterated.func, *iterated.args) if loader in ast.walk(each)), None)
        if isinstance(inner, ast.Attribute) and inner is iterated.func:
            return _one_round(inner.value, loader, text)
        if inner is not None and name not in _COUNTS:
            round_ = _one_round(inner, loader, text)
            return ast.Call(iterated.func, [round_, *iterated.args[1:]], []) if name == "enumerate" else round_
    raise UnpredictableError(f"{text} does not iterate over the batches of a loader; give its body as a step function")


def _has_training_loop(node: ast.AST) -> bool:
    return any(isinstance(each, ast.For) and _trains(each) for each in ast.walk(node))


def _needed(statements: list[ast.stmt], names: frozenset[str]) -> list[ast.stmt]:
    """Return the assignments and imports that bind the names, and those that these need, in their order."""
    needed: list[ast.stmt] = []
    for statement in reversed(statements):
        if names_bound(statement) & names:
            needed.insert(0, statement)
            names = names | names_read(statement)
    return needed
