"""Evaluation. Passes that need no graph, and modes that are set and never set back."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbguard.training.lint.program import Function, Hit, ParsedProgram, put_around, put_behind, rule
from nbguard.training.lint.rules.graphs import is_trained


@rule(
    "NBG301",
    "evaluation-with-graph",
    bad="model.eval()\nfor x, y in loader:\n    loss += loss_fn(model(x), y)",
    good="with torch.no_grad():\n    for x, y in loader: ...",
)
def evaluation_with_graph(program: ParsedProgram) -> Iterator[Hit]:
    """A model in evaluation mode goes through the batches while gradients are on.

    Each pass keeps its activations for a backward pass that never comes, and a sum of losses keeps the graphs of all batches.
    """
    if any(isinstance(node, ast.Attribute) and node.attr in ("requires_grad", "requires_grad_") for node in program.nodes):
        return
    for loop in program.nodes:
        if (
            not isinstance(loop, (ast.For, ast.AsyncFor))
            or not program.is_over_batches(loop)
            or program.may_lack_gradients(loop)
        ):
            continue
        model = _evaluated(program, loop)
        scope = program.scope(loop)
        is_called = not isinstance(scope, Function) or bool(program.callers(scope))
        if not model or not is_called or _uses_gradients(program, loop):
            continue
        calls = [
            call for call in program.own_calls(loop) if ast.unparse(call.func) == model and not program.may_lack_gradients(call)
        ]
        if calls:
            yield Hit(
                calls[0],
                f"`{model}` is evaluated with gradients on, so each pass keeps its activations; put it below `torch.no_grad()`",
            )


def _evaluated(program: ParsedProgram, loop: ast.AST) -> str:
    """Return the model that is put into evaluation mode shortly before a loop, in the same scope; empty for none."""
    before: list[ast.Call] = [
        call
        for call in program.own_calls(program.scope(loop))
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("eval", "train")
        and call.lineno < getattr(loop, "lineno", 0)
        if program.source.cell_of(call) == program.source.cell_of(loop)
    ]
    last = max(before, key=lambda call: call.lineno, default=None)
    if last is None or not isinstance(last.func, ast.Attribute) or last.func.attr != "eval":
        return ""
    return ast.unparse(last.func.value) if not program.is_conditional(last, program.scope(loop)) else ""


def _uses_gradients(program: ParsedProgram, loop: ast.AST) -> bool:
    """Say whether anything in a loop asks for gradients, would fail if they were on, or ends it after one pass."""
    for node in program.own(loop):
        if isinstance(node, (ast.Break, ast.Return)) or (isinstance(node, ast.keyword) and node.arg == "volatile"):
            return True
        if isinstance(node, ast.Attribute):
            if node.attr in ("backward", "grad", "step", "retain_grad", "train", "manual_backward"):
                return True
            if node.attr == "numpy":
                inner = ast.unparse(node.value)
                if "detach" not in inner and ".data" not in inner and "arg" not in inner:
                    return True
    return False


@rule(
    "NBG302",
    "evaluation-never-ends",
    bad="for epoch in range(n):\n    …train…\n    model.eval()",
    good="for epoch in range(n):\n    model.train()\n    …train…\n    model.eval()",
)
def evaluation_never_ends(program: ParsedProgram) -> Iterator[Hit]:
    """An epoch ends with the model in evaluation mode, and no epoch begins with `model.train()`.

    From the second epoch on, dropout and batch normalisation are off while the model trains.
    """
    for call in program.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "eval" and not call.args):
            continue
        for loop in program.loops(call)[:1]:
            model = ast.unparse(call.func.value)
            if not program.is_over_epochs(loop) or program.is_conditional(call, loop):
                continue
            passes = [
                each
                for each in program.own_calls(loop)
                if isinstance(each.func, ast.Attribute) and each.func.attr == "backward"
            ]
            trained = any(
                ast.unparse(each.func) == model and not program.may_lack_gradients(each) and each.lineno < call.lineno
                for each in program.own_calls(loop)
            )
            restored = any(
                isinstance(node, ast.Attribute) and node.attr in ("train", "training") for node in program.reached(loop)
            )
            given = any(
                isinstance(argument, ast.Name) and argument.id == model
                for each in _unknown_calls(program, loop)
                for argument in each.args
            )
            made = model.partition(".")[0] in program.bound(loop)
            before = passes and all(each.lineno < call.lineno for each in passes)
            if before and trained and not restored and not given and not made and _depends_on_mode(program):
                yield Hit(
                    call, f"no epoch sets `{model}.train()` again, so from the second one on it trains in evaluation mode"
                )


def _depends_on_mode(program: ParsedProgram) -> bool:
    """Say whether a layer that the file names is another one while it trains."""
    names = {node.attr for node in program.nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in program.nodes if isinstance(node, ast.Name)}
    return any("dropout" in name.lower() or "batchnorm" in name.lower() or name == "from_pretrained" for name in names)


def _unknown_calls(program: ParsedProgram, region: ast.AST) -> Iterator[ast.Call]:
    """Yield calls of functions that are defined elsewhere."""
    for call in program.own_calls(region):
        name = program.name(call.func)
        if name and name.partition(".")[0] not in ("torch", "print", "len") and name not in program.functions:
            yield call


_SWITCHES = frozenset(["torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.autograd.no_grad"])


@rule("NBG303", "context-without-with", bad="torch.no_grad()", good="with torch.no_grad():")
def context_without_with(program: ParsedProgram) -> Iterator[Hit]:
    """`torch.no_grad()` as a statement makes a context and drops it. Gradients stay on."""
    for node in program.nodes:
        match node:
            case ast.Expr(value=ast.Call(func=called)) if program.name(called) in _SWITCHES:
                name = program.name(called)
                yield Hit(node, f"`{name}()` has no effect without `with`: gradients stay as they are")


_METHODS = frozenset(["eval", "train", "zero_grad", "step", "backward"])


@rule("NBG304", "method-not-called", bad="model.eval", good="model.eval()")
def method_not_called(program: ParsedProgram) -> Iterator[Hit]:
    """A method such as `model.eval` stands as a statement without its parentheses.

    It does nothing then. The same is true of `torch.cuda.empty_cache` and `gc.collect`.
    """
    last = {program.source.cell_of(node): node for node in program.tree.body}
    for node in program.nodes:
        match node:
            case ast.Expr(value=ast.Attribute(value=owner, attr=method) as named):
                name = program.name(named)
            case _:
                continue
        is_shown = program.source.is_notebook and node in last.values()
        is_method = method in _METHODS and _has_mode(program, ast.unparse(owner))
        if not is_shown and (is_method or name in ("torch.cuda.empty_cache", "gc.collect", "torch.cuda.synchronize")):
            yield Hit(node, f"`{ast.unparse(named)}` does nothing without parentheses", put_behind(named, "()"))


def _has_mode(program: ParsedProgram, owner: str) -> bool:
    """Say whether the file calls a method of a model or an optimizer on a name elsewhere."""
    known = (*_METHODS, "parameters", "state_dict", "to", "cuda")
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in known and ast.unparse(call.func.value) == owner
        for call in program.calls
    )


@rule("NBG305", "result-dropped", bad="state.detach()", good="state = state.detach()")
def result_dropped(program: ParsedProgram) -> Iterator[Hit]:
    """`detach()` returns a new tensor and leaves the old one as it is; as a statement it has no effect."""
    last = {program.source.cell_of(node): node for node in program.tree.body}
    for node in program.nodes:
        match node:
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) as owner, attr="detach"), args=[], keywords=[])
            ):
                pass
            case _:
                continue
        if not (program.source.is_notebook and node in last.values()) and not _has_its_own_detach(program, name):
            yield Hit(
                node,
                f"`{name}.detach()` returns a new tensor and leaves `{name}` as it is",
                put_around(owner, f"{name} = ", ""),
            )


def _has_its_own_detach(program: ParsedProgram, name: str) -> bool:
    """Say whether a name may stand for a module or another object that defines its own `detach`."""
    if is_trained(program, name) or _is_part_of_model(program, name):
        return True
    made = [call.func for call in program.made(name)]
    while made:
        match made.pop():
            case ast.Attribute(value=ast.Call(func=inner)):  # `Memory().to(device)`
                made.append(inner)
            case ast.Name(id=called) | ast.Attribute(attr=called) if called[:1].isupper() and called != "Tensor":
                return True
    return False


def _is_part_of_model(program: ParsedProgram, name: str) -> bool:
    """Say whether a name stands for each module of a model in a loop."""
    for node in program.nodes:
        match node:
            case ast.For(target=target, iter=ast.Call(func=ast.Attribute(attr=attr))) if attr.endswith(("modules", "children")):
                if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target)):
                    return True
    return False
