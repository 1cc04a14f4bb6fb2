"""A program as rules look at it. Qualified names, scopes, loops, bindings, gradients. Pure; only the source is known."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import cleandoc
from itertools import takewhile

from nbguard.cell_names import bindings, names_of
from nbguard.training.lint.source import Edit, Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_USUAL = {
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "np": "numpy",
    "plt": "matplotlib.pyplot",
    "DataLoader": "torch.utils.data.DataLoader",
}
"""Names that `from fastai.vision.all import *` and its like bring, or that a file leaves to others."""
_FRAMEWORKS = frozenset(
    ["torch", "fastai", "fastbook", "lightning", "pytorch_lightning", "transformers", "accelerate", "torchvision"]
)
_LOADER = re.compile(r"loader|(^|_)dls?$|(^|_)dl_|dataloader", re.IGNORECASE)
_WRAPPERS = frozenset(
    ["enumerate", "tqdm", "tqdm.tqdm", "zip", "progress_bar", "iter", "track", "tqdm.auto.tqdm", "tqdm.notebook.tqdm"]
)
_NO_GRADIENTS = frozenset(["torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode"])
_HARMLESS_CONTEXTS = re.compile(r"(^|\.)(autocast|tqdm|open|profile|record_function|trange|Progress|Timer|timer|suppress)$")


def up_to(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes around a node, from the inside."""
    while node in parents:
        node = parents[node]
        yield node


class ParsedProgram:
    """The syntax tree of a file with the questions that rules ask of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree = source.tree
        self.nodes: tuple[ast.AST, ...] = tuple(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._own: dict[ast.AST, tuple[ast.AST, ...]] = {}
        self._bound: dict[ast.AST, frozenset[str]] = {}

    # --- names

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The names that imports bind, with the qualified names that they stand for."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def uses_torch(self) -> bool:
        """Whether it imports PyTorch, or a library that stands on it."""
        return any(name.partition(".")[0] in _FRAMEWORKS for name in self.aliases.values())

    def name(self, node: ast.AST | None) -> str:
        """Return the qualified name of an expression: `torch.nn.Linear` for `nn.Linear`; empty for any other expression."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        first = self.aliases.get(node.id) or _USUAL.get(node.id, node.id)
        return ".".join([first, *reversed(parts)])

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """All calls, in no order."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods that it defines, by name."""
        found: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes that it defines, by name."""
        return {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}

    def is_module(self, made: ast.ClassDef) -> bool:
        """Say whether a class is one of PyTorch's modules."""
        bases = [self.name(base) for base in made.bases]
        known = any(base.startswith("torch.nn.") or base.endswith("LightningModule") for base in bases)
        inner = [self.classes[base] for base in bases if base in self.classes and self.classes[base] is not made]
        return known or any(self.is_module(each) for each in inner)

    # --- scopes and loops

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, from the inside."""
        return up_to(node, self._parents)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function or the module around a node."""
        return next((each for each in self.around(node) if isinstance(each, (*_SCOPES, ast.Module))), self.tree)

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement around a node."""
        return next((each for each in (node, *self.around(node)) if isinstance(each, ast.stmt)), node)

    def own(self, region: ast.AST) -> tuple[ast.AST, ...]:
        """Return the nodes in a region that are not in a function or class inside of it."""
        if region not in self._own:
            found, waiting = [], [*ast.iter_child_nodes(region)]
            while waiting:
                node = waiting.pop()
                found.append(node)
                if not isinstance(node, _SCOPES):
                    waiting += ast.iter_child_nodes(node)
            self._own[region] = tuple(found)
        return self._own[region]

    def own_calls(self, region: ast.AST) -> list[ast.Call]:
        """Return the calls of a region that run when it runs."""
        return [node for node in self.own(region) if isinstance(node, ast.Call)]

    def bound(self, region: ast.AST) -> frozenset[str]:
        """Return the names that a region binds in its scope."""
        if region not in self._bound:
            code = ast.Module(body=region.body, type_ignores=[]) if isinstance(region, Function) else region
            self._bound[region] = frozenset(name for name, node in bindings(code) if node is not region)
        return self._bound[region]

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops of its scope that run a node again and again, from the inside."""
        found: list[Loop] = []
        inner = node
        for each in self.around(node):
            if isinstance(each, _SCOPES):
                break
            if isinstance(each, Loop) and inner in (*each.body, getattr(each, "test", None)):
                found.append(each)
            inner = each
        return found

    def binds_once(self, region: ast.AST, name: str) -> bool:
        """Say whether a region binds a name in one place."""
        stores = [node for node in self.own(region) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        return sum(node.id == name for node in stores) == 1

    def is_conditional(self, node: ast.AST, region: ast.AST) -> bool:
        """Say whether something within a region decides whether a node runs."""
        for each in self.around(node):
            if each is region:
                return False
            if isinstance(each, (ast.If, ast.IfExp, ast.Match, ast.ExceptHandler, ast.BoolOp, ast.While)):
                return True
        return False

    def iterated(self, loop: Loop) -> ast.expr | None:
        """Return the expression over which a loop runs, without `enumerate` and the like; None for `while`."""
        iterated = loop.iter if isinstance(loop, (ast.For, ast.AsyncFor)) else None
        while isinstance(iterated, ast.Call) and iterated.args and self.name(iterated.func) in _WRAPPERS:
            iterated = iterated.args[0]
        return iterated

    def looped_over(self, loop: Loop) -> str:
        """Return the name over which a loop runs, without `enumerate` and the like; empty where that has none."""
        iterated = self.iterated(loop)
        return ast.unparse(iterated) if isinstance(iterated, (ast.Name, ast.Attribute, ast.Subscript)) else ""

    def is_over_batches(self, loop: Loop) -> bool:
        """Say whether a loop runs over a DataLoader."""
        name = self.looped_over(loop)
        is_made = any(self.name(value.func).endswith("DataLoader") for value in self.made(name))
        return bool(name) and (is_made or bool(_LOADER.search(re.split(r"[.\[]", name)[-1] if "[" not in name else name)))

    def is_over_epochs(self, loop: Loop) -> bool:
        """Say whether a loop runs over `range(...)` more than once, as far as its end is known."""
        iterated = self.iterated(loop)
        if not isinstance(iterated, ast.Call) or self.name(iterated.func).rpartition(".")[2] not in ("range", "trange"):
            return False
        return not iterated.args or self.number(iterated.args[-1]) not in (0, 1)

    def number(self, node: ast.expr | None) -> float | None:
        """Return the number that an expression is, also as a name with one value; None where it is not known."""
        if isinstance(node, ast.Name) and len(values := self.assigned(node.id)) == 1:
            node = values[0]
        return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) else None

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            value = node.value
            targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                    for each, part in zip(target.elts, value.elts, strict=True):
                        found.setdefault(ast.unparse(each), []).append(part)
                else:
                    found.setdefault(ast.unparse(target), []).append(value)
        return found

    def assigned(self, key: str) -> list[ast.expr]:
        """Return all values that the file assigns to a target such as `model` or `self.losses`."""
        return self._assigned.get(key, [])

    def made(self, key: str) -> list[ast.Call]:
        """Return the calls whose results the file assigns to a target."""
        return [value for value in self.assigned(key) if isinstance(value, ast.Call)]

    # --- gradients

    def may_lack_gradients(self, node: ast.AST) -> bool:
        """Say whether gradients may be switched off where a node runs, by a context, a decorator or a caller."""
        return self._switches_off or self._lacks(node, frozenset())

    def may_lack_within(self, node: ast.AST, region: ast.AST) -> bool:
        """Say whether a `with` inside a region may switch gradients off at a node."""
        return any(map(self._may_switch_off, takewhile(lambda each: each is not region, self.around(node))))

    @cached_property
    def _switches_off(self) -> bool:
        """Whether the file switches gradients off for the whole process."""
        calls = [call for call in self.calls if self.name(call.func).endswith("set_grad_enabled")]
        return any(not isinstance(self._parents.get(call), ast.withitem) for call in calls)

    def _lacks(self, node: ast.AST, seen: frozenset[str]) -> bool:
        for each in self.around(node):
            if self._may_switch_off(each):
                return True
            if isinstance(each, Function):
                if each.decorator_list or each.name in seen:
                    return bool(each.decorator_list)
                callers = [call for call in self.calls if self._called(call) == each.name]
                return any(self._lacks(call, seen | {each.name}) for call in callers)
            if isinstance(each, ast.Lambda):
                return True
        return False

    def _may_switch_off(self, node: ast.AST) -> bool:
        """Say whether a node is a `with` statement that may switch gradients off."""
        if not isinstance(node, (ast.With, ast.AsyncWith)):
            return False
        return not all(self._is_harmless(item.context_expr) for item in node.items)

    def _is_harmless(self, context: ast.expr) -> bool:
        return isinstance(context, ast.Call) and bool(_HARMLESS_CONTEXTS.search(self.name(context.func)))

    def _called(self, call: ast.Call) -> str:
        return str(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))

    def callers(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function by its name."""
        return [call for call in self.calls if self._called(call) == function.name]

    def reached(self, region: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that run in a region, also in functions of the file that it calls."""
        waiting, seen = [region], set[ast.AST]()
        while waiting:
            part = waiting.pop()
            if part in seen:
                continue
            seen.add(part)
            for node in self.own(part):
                yield node
                if isinstance(node, ast.Call):
                    called = self._called(node)
                    waiting += self.functions.get(called, [])
                    if called in self.classes:
                        waiting += [each for each in self.classes[called].body if isinstance(each, Function)]

    def losses(self, region: ast.AST) -> dict[str, list[ast.Call]]:
        """Return the names on which a region calls `backward`, with the calls."""
        found: dict[str, list[ast.Call]] = {}
        for call in self.own_calls(region):
            if not (isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward")):
                continue
            receiver: ast.expr = call.func.value
            while isinstance(receiver, (ast.Call, ast.BinOp)):
                if isinstance(receiver, ast.BinOp):
                    receiver = receiver.left
                elif receiver.args:  # scaler.scale(loss)
                    receiver = receiver.args[0]
                else:
                    receiver = receiver.func.value if isinstance(receiver.func, ast.Attribute) else receiver.func
            first = call.args[0] if call.args else None
            is_of_library = isinstance(first, ast.Name) and ast.unparse(receiver).rpartition(".")[2] in (
                "accelerator",
                "fabric",
                "self",
            )
            loss = first if is_of_library else receiver
            found.setdefault(ast.unparse(loss) if isinstance(loss, (ast.Name, ast.Attribute)) else "", []).append(call)
        return found

    def feeding(self, scope: ast.AST, names: set[str]) -> set[str]:
        """Return names together with the names that go into their values in a scope."""
        needs: dict[str, set[str]] = {}
        for node in self.own(scope):
            match node:
                case ast.Assign(targets=targets, value=value):
                    into = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
                case ast.AugAssign(target=target, value=value) | ast.For(target=target, iter=value):
                    into = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" | "insert"), args=[*_, value]
                ):
                    into = {name}
                case _:
                    continue
            read = names_of(ast.Expr(value=value)).read
            for name in into:
                needs.setdefault(name, set()).update(read)
        found, waiting = set(names), [*names]
        while waiting:
            for name in needs.get(waiting.pop(), set()) - found:
                found.add(name)
                waiting.append(name)
        return found


# --- A rule. Its code, its name, the search in a program, and one line that it reports with the line to write instead


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that breaks a rule."""

    node: ast.AST
    message: str
    edits: tuple[Edit, ...] = ()  # the repair, where it is certain


Find = Callable[[ParsedProgram], Iterable[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule. Its description is the docstring of its search."""

    code: str
    name: str
    find: Find
    bad: str  # the line that is reported
    good: str  # the line to write instead
    in_notebooks_only: bool = False

    @property
    def description(self) -> str:
        """Return the description as one paragraph."""
        return " ".join(cleandoc(self.find.__doc__ or "").split())


def rule(code: str, name: str, *, bad: str, good: str, in_notebooks_only: bool = False) -> Callable[[Find], Rule]:
    """Make a rule of the function below."""
    return lambda find: Rule(code=code, name=name, find=find, bad=bad, good=good, in_notebooks_only=in_notebooks_only)


def put_behind(node: ast.AST, text: str) -> tuple[Edit, ...]:
    """Return the edit that adds text behind an expression."""
    line, column = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
    return (Edit(line, column, column, text),)


def put_around(node: ast.AST, before: str, after: str) -> tuple[Edit, ...]:
    """Return the edits that put an expression between two texts."""
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return (Edit(line, column, column, before), *put_behind(node, after))


_PARENTHESIS_OR_COMMENT = re.compile(rb"#.*|\)")


def put_behind_arguments(program: ParsedProgram, call: ast.Call, text: str) -> tuple[Edit, ...]:
    """Return the edit that adds text behind the last argument of a call, and before a comma that follows it."""
    given = [*call.args, *(word.value for word in call.keywords)]
    line, column = max((each.end_lineno or 0, each.end_col_offset or 0) for each in given)
    closing = []  # those around the last argument, then the call's own
    for number in range(line, (call.end_lineno or 0) + 1):
        rest = program.source.lines[number - 1].encode()[: call.end_col_offset if number == call.end_lineno else None]
        found = _PARENTHESIS_OR_COMMENT.finditer(rest, column if number == line else 0)
        closing += [(number, each.end()) for each in found if each[0] == b")"]
    line, column = closing[-2] if len(closing) > 1 else (line, column)
    return (Edit(line, column, column, text),)


def first_of_each_line(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Yield hits, the first one of each line and message."""
    seen = set()
    for hit in hits:
        key = (getattr(hit.node, "lineno", 0), hit.message)
        if key not in seen:
            seen.add(key)
            yield hit
