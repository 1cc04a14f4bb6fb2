"""The last error, where it ran out of memory, with its request, the facts in its frames, and the rest of its cell."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any, Literal

from nbguard.libraries import training_functions
from nbguard.memory.core.oom_facts import HOST_KINDS, AllocatorCounts, CodeLine, EarlierFailure, OomFact
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, mro_of, name_of, namespace_of
from nbguard.memory.scan.learners import experiment_of
from nbguard.memory.scan.oom.chain import find_in_chain, is_exception, note_of, slot
from nbguard.memory.scan.oom.failed_runs import earlier_failures, outlived_run, passed_run, run_of_cell, start_of
from nbguard.memory.scan.oom.names import (
    counted_loop,
    filled_in_loops,
    length_of_list,
    made_by,
    names_in,
    names_of_functions,
    reached_by,
    replaced_by,
)
from nbguard.memory.scan.roots.frames import OPTIMIZED, frame_locals
from nbguard.memory.scan.roots.tracebacks import error_holders
from nbguard.texts import numbers_of_cells

# --- The rest of a cell after the request that failed: may it allocate more, by its source and the place in each frame.


_MAKING = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_SINGLE = frozenset({*_MAKING, *(f"{name}_like" for name in _MAKING), "arange", "clone", "cuda"})
"""Functions of PyTorch that make one tensor, with one request."""
_KEEPING = frozenset({"append", "add", "insert", "setdefault"})
"""Methods of containers that keep their arguments and make nothing."""
_PLAIN = (ast.Name, ast.Constant, ast.Attribute, ast.expr_context)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
_PLAIN_STATEMENTS = (ast.Pass, ast.Delete, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.Lambda)
_BELOW = ("nbguard.", "torch.utils._python_dispatch")
"""Beginnings of the names of modules that a request on a simulated device goes through."""


def may_go_on(error: BaseException, files: Collection[str]) -> bool:
    """Say whether the cell may allocate more once the request is served that `error` is about, of an unknown number of bytes.

    It may not where the request is the last thing that each function of the notebook does, and the last thing in the cell.
    The elements of a list of known length count by themselves (`OomFact.elements`). `files` are those of the notebook's cells.
    """
    places = list(_places(error))
    while places and _is_below(places[-1][0]):
        places.pop()
    while places and _file(places[0][0]) not in files:
        places.pop(0)
    if not places or any(_file(frame) not in files for frame, _ in places):
        return True
    return not all(
        _ends_there(frame, instruction, is_deepest=number == len(places) - 1)
        for number, (frame, instruction) in enumerate(places)
    )


def _places(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """Yield the frames of an error from the outermost on, each with the instruction that it had reached."""
    traceback = slot(error, "__traceback__")
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _file(frame: types.FrameType) -> str:
    return frame.f_code.co_filename


def _is_below(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return type(module) is str and module.startswith(_BELOW)


def _ends_there(frame: types.FrameType, instruction: int, *, is_deepest: bool) -> bool:
    """Say whether a function has nothing left to do that may allocate after its current call."""
    try:
        tree = ast.parse("".join(linecache.getlines(_file(frame))))
    except (SyntaxError, ValueError, RecursionError):
        return False
    above = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    place = _expression_at(tree, frame.f_code, instruction)
    if place is None or (is_deepest and not _is_one_request(place)):
        return False
    node: ast.AST = place
    while (parent := above.get(node)) is not None:
        if isinstance(parent, _FUNCTIONS) or (isinstance(parent, ast.ListComp) and frame.f_code.co_name == "<listcomp>"):
            return not isinstance(parent, ast.FunctionDef) or not _yields(parent)
        if not _is_last_in(parent, node, frame):
            return False
        node = parent
    return True


def _expression_at(tree: ast.AST, code: types.CodeType, instruction: int) -> ast.expr | None:
    """Return the expression that an instruction belongs to; None where this Python (before 3.11) does not tell."""
    positions: Any = getattr(code, "co_positions", None)
    if positions is None:
        return None
    line, end_line, column, end_column = next(islice(positions(), instruction // 2, None), (None,) * 4)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (
            line,
            end_line,
            column,
            end_column,
        ):
            return node
    return None


def _is_one_request(node: ast.AST) -> bool:
    """Say whether an expression is known to make one request: it makes a tensor, or is arithmetic with two operands."""
    if isinstance(node, ast.Call):
        return (isinstance(node.func, ast.Attribute) and node.func.attr in _SINGLE) or (
            isinstance(node.func, ast.Name) and node.func.id in _SINGLE
        )
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div)


def _is_last_in(parent: ast.AST, node: ast.AST, frame: types.FrameType) -> bool:
    """Say whether nothing in `parent` that may allocate comes after its part `node`."""
    match parent:
        case ast.Call(func=ast.Attribute(attr=attr), args=args):
            return attr in _KEEPING and node in args and not parent.keywords and _are_plain(args[args.index(node) + 1 :])
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return _are_plain(elements[elements.index(node) + 1 :])  # type: ignore[arg-type]
        case ast.Dict(values=values):
            return node in values and _are_plain(values[values.index(node) + 1 :])
        case ast.ListComp():
            return counted_loop(parent) is not None and node is parent.elt
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Expr() | ast.NamedExpr():
            return True
        case ast.Module() | ast.If() | ast.With():
            return _rest_is_plain(parent, node)
        case ast.For():
            is_counted = counted_loop(parent) is not None
            return not parent.orelse and _rest_is_plain(parent, node) and (is_counted or _is_last_turn(parent, frame))
        case ast.Try():
            return node in parent.body and _rest_is_plain(parent, node) and not parent.orelse and not parent.finalbody
    return False


def _rest_is_plain(parent: Any, node: ast.AST) -> bool:
    """Say whether the statements after `node` in its block allocate nothing."""
    block = next((block for block in (parent.body, getattr(parent, "orelse", ())) if node in block), None)
    return block is not None and all(map(_is_plain_statement, block[block.index(node) + 1 :]))


def _is_plain_statement(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=value) | ast.Expr(value=value):
            return _are_plain([value])
        case ast.Return(value=value):
            return value is None or _are_plain([value])
        case ast.FunctionDef(decorator_list=[]):
            return True
    return isinstance(statement, _PLAIN_STATEMENTS)


def _are_plain(expressions: Iterable[ast.AST]) -> bool:
    return all(isinstance(part, (*_PLAIN, *_DISPLAYS)) for one in expressions for part in ast.walk(one))


def _is_last_turn(loop: ast.For, frame: types.FrameType) -> bool:
    """Say whether a loop over numbers or strings that are written down was at the last of them."""
    if not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Tuple | ast.List):
        return False
    values = [one.value for one in loop.iter.elts if isinstance(one, ast.Constant)]
    if len(values) != len(loop.iter.elts) or not values or values.count(values[-1]) != 1:
        return False
    found = frame_locals(frame) if frame.f_code.co_flags & OPTIMIZED else frame.f_globals
    value = found.get(loop.target.id)
    return type(value) is type(values[-1]) and type(value) in (int, str, float) and value == values[-1]


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


PLACEHOLDERS = "nbguard.memory.cleanup.apply.tracebacks"
"""Name of the module whose class takes the place of released objects in the frames of an error."""

_OF_A_MODEL = {
    "torch.nn.modules.module": ("_call_impl",),
    "torch.autograd": ("backward", "grad"),
    "torch.optim.optimizer": ("wrapper", "_use_grad"),
}
"""Functions of PyTorch that run a model, compute its gradients or change its parameters."""


def oom_fact(shell: Any, inputs: Sequence[str], failed: BaseException | None) -> OomFact | None:
    """Return the request of the error being handled, or else of the last one, if it ran out of memory.

    Args:
        shell: the IPython shell, or None.
        inputs: the sources of the session's cells, by number.
        failed: the error that ends the process, if one does. No other is read then.
    """
    last = next((value for value in error_holders(shell) if is_exception(value)), None) if failed is None else failed
    for shown in (sys.exc_info()[1] if failed is None else failed, last):
        oom_in_chain = None if shown is None else find_in_chain(shown)
        if shown is not None and oom_in_chain is not None:
            break
    else:
        return None
    error, text = oom_in_chain
    trace = _Trace.of((error, shown), shell, Sites() if failed is not None else None)
    reads, binds = trace.names(inputs)
    learner, batch_size = trace.learner()
    trains = trace.trains(inputs)
    at_the_failure = note_of(text)
    note = text.note() if at_the_failure is None else at_the_failure
    cell = _cell_of(trace.cell, None if note is None else note.cell, inputs)
    device = text.device if at_the_failure is None else at_the_failure.device
    run, kept = _run_of(cell, trace.at, device, shell, inputs), run_of_cell(cell)
    return OomFact(
        device=device,
        requested=text.requested if at_the_failure is None else at_the_failure.requested,
        slack=text.slack if at_the_failure is None else 0,
        kind=text.kind,
        limit=text.limit if at_the_failure is None else at_the_failure.limit,
        error=name_of(type(error)),
        shown="" if error is shown else name_of(type(shown)),
        cell=cell,
        line=trace.line,
        uses=tuple(sorted(reads)),
        bound=tuple(sorted(binds | run.bound)),
        makes=tuple(sorted(run.makes)),
        reaches=None if run.reaches is None else tuple(sorted(run.reaches)),
        replaces=tuple(sorted(run.replaces)),
        start=run.start,
        has_replaced=run.has_replaced,
        elements=run.elements,
        earlier=run.earlier,
        goes_on=shell is not None and may_go_on(error, numbers_of_cells(shell)),
        learner=learner,
        batch_size=batch_size,
        runs_model=trace.runs_model(),
        fills=tuple(sorted(trace.fills())),
        trains=trains,
        guard=trace.guard() if trains or learner else "",
        was_released=trace.was_released(),
        is_final=failed is not None,
        has_passed=cell in passed_run(),
        is_outlived=cell is not None and cell == outlived_run(),
        growing=None if kept is None else kept.growing,
        had_graph=kept is not None and kept.had_graph,
        note=note,
        host=host_facts() if text.kind in HOST_KINDS else None,
    )


def _cell_of(traced: int | None, noted: int | None, inputs: Sequence[str]) -> int | None:
    """Return the number of the cell that failed, by its trace or by the note of the moment.

    ipykernel names the code of a cell by its source alone, so that a trace leads to the latest run of the same source.
    """
    if traced is None or noted is None:
        return noted if traced is None else traced
    is_known = 0 <= noted < len(inputs) and 0 <= traced < len(inputs)
    return noted if is_known and inputs[noted] == inputs[traced] else traced


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The run of a cell, by its source and the state at its start."""

    bound: set[str] = field(default_factory=set)  # names that are new or bound again since the beginning
    makes: set[str] = field(default_factory=set)  # names that a run binds before anything reads them
    reaches: set[str] | None = None  # names that any code of the run may reach; None if it may be any
    replaces: set[str] = field(default_factory=set)  # names whose present values no whole run can read
    start: AllocatorCounts | None = None  # the device's counters at the beginning; None if not noted
    has_replaced: bool = False  # a name that led to more than a number or a string leads elsewhere now
    elements: int | None = None  # number of elements of the list that the failing line builds; None if unknown
    earlier: tuple[EarlierFailure, ...] = ()  # failed runs of the same source before it


def _run_of(cell: int | None, at: int, device: str, shell: Any, inputs: Sequence[str]) -> _Run:
    """Return the run of cell number `cell`, which failed in line `at`, as far as it is known."""
    if shell is None or cell is None or not 0 <= cell < len(inputs):
        return _Run()
    source, namespace, start = inputs[cell], shell.user_ns, start_of(cell)
    global_names = names_of_functions(namespace)
    reaches, makes = reached_by(source, namespace, global_names), made_by(source, at, global_names)
    replaces, elements = replaced_by(source, global_names), length_of_list(source, at)
    if start is None:
        return _Run(makes=makes, reaches=reaches, replaces=replaces, elements=elements)
    now = {name: id(value) for name, value in namespace.items() if type(name) is str}
    ended = now if start.ended is None else start.ended
    changed = {name for name in ended.keys() | start.names.keys() if ended.get(name) != start.names.get(name)}
    changed = {name for name in changed if not name.startswith("_")}
    counts = start.devices.get(device, AllocatorCounts()) if device else None
    replaced = changed & start.names.keys() - start.atoms
    later = {name for name in now if now[name] != ended.get(name)}  # not the failed run's any more
    return _Run(
        bound=(changed & now.keys()) - later,
        makes=makes - later,
        reaches=reaches,
        replaces=replaces,
        start=counts,
        has_replaced=bool(replaced),
        elements=elements,
        earlier=tuple(earlier_failures(cell, device, namespace, inputs, global_names)),
    )


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """The frames of an error from the outermost on, each with the line it had reached. Lives only while it is read.

    `cell` is the number of the cell that ran, `at` its line; `line` the deepest line in a cell (in a script: of its own).
    """

    frames: list[tuple[types.FrameType, int]]
    cell: int | None = None
    at: int = 0
    line: CodeLine | None = None
    sites: Sites | None = None

    @classmethod
    def of(cls, errors: Sequence[BaseException], shell: Any, sites: Sites | None) -> _Trace:
        """Return the frames of the first of `errors` that passed through the user's own code.

        That is the code of cells, of a script's `__main__`, and, with `sites`, of the modules that are no library's.
        """
        numbers = numbers_of_cells(shell)
        for error in errors:
            trace = cls(frames=list(_frames(error)), sites=sites)
            if shell is None:
                own: list[tuple[int | None, types.FrameType, int]] = [
                    (None, f, at) for f, at in trace.frames if trace.is_users(f)
                ]
            else:
                own = [(numbers[f.f_code.co_filename], f, at) for f, at in trace.frames if f.f_code.co_filename in numbers]
            if own:
                number, frame, at = own[-1]
                file = frame.f_code.co_filename
                text = linecache.getline(file, at).strip()
                text = text if len(text) <= 80 else f"{text[:79]}…"
                line = CodeLine(number, at, text, "" if sites is None else sites.place(file))
                return replace(trace, cell=own[0][0], at=own[0][2], line=line)
        return trace

    def is_users(self, frame: types.FrameType) -> bool:
        """Say whether a frame is of the script's own code."""
        if frame.f_globals.get("__name__") == "__main__":
            return True
        return self.sites is not None and self.sites.is_users(frame.f_code.co_filename)

    def names(self, inputs: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return (the names that the run reads, those that it had bound before it failed)."""
        source = inputs[self.cell] if self.cell is not None and 0 <= self.cell < len(inputs) else ""
        reads, binds = names_in(source, self.at)
        functions = (frame.f_code for frame, _ in self.frames if self.is_users(frame))
        return reads.union(*(code.co_names for code in functions if code.co_flags & OPTIMIZED)), binds

    def learner(self) -> tuple[int, int | None]:
        """Return (id, batch size) of the Learner in the frames' variables, or (0, None)."""
        kinds = Kinds()
        for value in self._variables():
            if kinds.of(type(value)) == "learner":
                attributes = attributes_of(value) or {}
                return id(value), _batch_size(attributes.get("dl")) or _batch_size(_first_loader(attributes.get("dls")))
        return 0, None

    def guard(self) -> Literal["", "callback", "itself", "model", "parts"]:
        """Return the kind of guard that would let this training go on in pieces; empty where it is known to be refused."""
        kinds = Kinds()
        for value in self._variables():
            kind = kinds.of(type(value))
            if kind == "learner" and (experiment := experiment_of(type(value))).guard:
                return "" if _is_undividable(attribute_of(value, "model")) else experiment.guard
            if kind == "model" and _is_undividable(value):
                return ""
        return "parts" if self.runs_model() else ""

    def runs_model(self) -> bool:
        """Say whether a module was called, or gradients computed or used, so that the batch decides on the size."""
        return any(_is_of_a_model(frame) for frame, _ in self.frames)

    def fills(self) -> set[str]:
        """Return the names of containers that the user's loops fill, but for loops inside a model: these are of one batch."""
        around = takewhile(lambda one: not _is_of_a_model(one[0]), self.frames)
        own = [(frame, at) for frame, at in around if self.is_users(frame)]
        return set().union(*(filled_in_loops("".join(linecache.getlines(f.f_code.co_filename)), at) for f, at in own))

    def trains(self, inputs: Sequence[str]) -> bool:
        """Say whether the cell, or a function that ran, speaks of a backward pass or is a library's training loop."""
        source = inputs[self.cell] if self.cell is not None and 0 <= self.cell < len(inputs) else ""
        words = {word for frame, _ in self.frames for word in (frame.f_code.co_name, *frame.f_code.co_names)}
        return "backward" in words or not training_functions().isdisjoint(words) or "backward" in source

    def was_released(self) -> bool:
        """Say whether a cleanup has put placeholders in the place of the frames' variables."""
        return any(namespace_of(type(value)).get("__module__") == PLACEHOLDERS for value in self._variables())

    def _variables(self) -> Iterator[Any]:
        for frame, _ in self.frames:
            if frame.f_code.co_flags & OPTIMIZED:
                yield from frame_locals(frame).values()


_DEEP = 20
"""Levels of a model that are searched for layers."""


def _is_undividable(module: Any, depth: int = 0) -> bool:
    """Say whether a model is compiled, or has batch norms that take the statistics of a batch."""
    names = {name_of(base) for base in mro_of(type(module))}
    if "OptimizedModule" in names or ("_BatchNorm" in names and attribute_of(module, "training") is not False):
        return True
    children = attribute_of(module, "_modules")
    return type(children) is dict and depth < _DEEP and any(_is_undividable(each, depth + 1) for each in children.values())


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    traceback = slot(error, "__traceback__")
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_of_a_model(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return type(module) is str and frame.f_code.co_name in _OF_A_MODEL.get(module, ())


def _first_loader(loaders: Any) -> Any:
    listed = attribute_of(loaders, "loaders")
    return listed[0] if type(listed) is list and listed else None


def _batch_size(loader: Any) -> int | None:
    size = attribute_of(loader, "bs")
    return size if type(size) is int and size > 0 else None
