"""Graphs. Tensors that are kept with the graph of the computation that made them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbguard.training.lint.program import Function, Hit, Loop, ParsedProgram, put_behind, rule

_KEEP_GRAPH = frozenset(
    [
        "abs",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "double",
        "exp",
        "flatten",
        "float",
        "mean",
        "reshape",
        "sqrt",
        "squeeze",
        "sum",
        "to",
        "unsqueeze",
        "view",
    ]
)
"""Methods whose result has the graph of their tensor."""
_CLEARS = frozenset(["clear", "pop", "popleft", "zero_"])


def graph_part(node: ast.expr, name: str) -> ast.expr | None:
    """Return the part of an expression that brings a tensor's graph into its value; None where it does not."""
    match node:
        case ast.Name(id=found) if found == name:
            return node
        case ast.Attribute() if ast.unparse(node) == name:
            return node
        case ast.BinOp(left=left, right=right):
            return graph_part(left, name) or graph_part(right, name)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _KEEP_GRAPH:
            return graph_part(inner, name)
    return None


def _kept(program: ParsedProgram, region: ast.AST, name: str) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Yield each statement of a region that keeps a tensor's graph, with the keeper and the tensor's place."""
    for node in program.own(region):
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=value):
                pass
            case ast.Assign(
                targets=[ast.Name() | ast.Attribute() as target], value=ast.BinOp(left=left, op=ast.Add(), right=right)
            ):
                same = [ast.unparse(left) == ast.unparse(target), ast.unparse(right) == ast.unparse(target)]
                if not any(same):
                    continue
                value = right if same[0] else left
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
                pass
            case _:
                continue
        part = graph_part(value, name)
        if part is None or (program.may_lack_within(node, region) and not (isinstance(node, ast.Call) and part is value)):
            continue  # the sum of a loss has no graph there; the loss itself has
        yield node, ast.unparse(target), part


def _starts_empty(program: ParsedProgram, keeper: str) -> bool:
    """Say whether a keeper begins as a number, a tensor of zeros, or an empty collection."""
    values = program.assigned(keeper)
    base = keeper.partition("[")[0]
    if base != keeper:
        values = program.assigned(base)
    for value in values:
        match value:
            case ast.Constant(value=int() | float()) | ast.List() | ast.Dict() | ast.DictComp() | ast.ListComp():
                continue
            case ast.Call(func=called) if program.name(called).rpartition(".")[2] in (
                "list",
                "dict",
                "defaultdict",
                "zeros",
                "tensor",
            ):
                continue
            case _:
                return False
    return bool(values)


def _is_cleared(program: ParsedProgram, region: ast.AST, keeper: str) -> bool:
    """Say whether a region empties a keeper again."""
    base = keeper.partition("[")[0]
    for node in program.own(region):
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if method in _CLEARS and ast.unparse(target) in (
                keeper,
                base,
            ):
                return True
            case ast.Assign(targets=targets):
                for target in targets:
                    text = ast.unparse(target)
                    grows = isinstance(node.value, ast.BinOp) and keeper in (
                        ast.unparse(node.value.left),
                        ast.unparse(node.value.right),
                    )
                    if text in (keeper, base) and not grows:
                        return True
                    if (
                        isinstance(target, ast.Subscript)
                        and isinstance(target.slice, ast.Slice)
                        and ast.unparse(target.value) in (keeper, base)
                    ):
                        return True
            case ast.Delete(targets=targets):
                if any(ast.unparse(target).partition("[")[0] == base for target in targets):
                    return True
            case ast.AugAssign(target=target, op=ast.Mult()) if ast.unparse(target) == keeper:
                return True
    return False


def _is_detached(program: ParsedProgram, region: ast.AST, name: str) -> bool:
    """Say whether a region may give a name a value without a graph."""
    values = []
    for node in program.own(region):
        match node:
            case ast.Assign(targets=targets, value=value) if any(ast.unparse(target) == name for target in targets):
                values.append(value)
            case ast.Call(func=ast.Attribute(value=target, attr="detach_")) if ast.unparse(target) == name:
                return True
    ends = ("item", "detach", "tolist", "numpy", "asscalar")
    return any(
        (isinstance(inner, ast.Attribute) and (inner.attr in ends or inner.attr == "data"))
        or (isinstance(inner, ast.Name) and inner.id == "float")
        for value in values
        for inner in ast.walk(value)
    )


def _regions(program: ParsedProgram) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yield each loop, or function without one, that calls `backward`, with its scope and the loss."""
    for scope in (program.tree, *(each for functions in program.functions.values() for each in functions)):
        for loss, calls in program.losses(scope).items():
            loops = program.loops(calls[0])
            again = any(keyword.arg in ("retain_graph", "create_graph") for call in calls for keyword in call.keywords)
            if loss and not again:
                yield loops[0] if loops else scope, scope, loss


def _keepers(program: ParsedProgram, region: ast.AST, scope: ast.AST, name: str) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Yield each place of a region where the graph of a name stays beyond a pass."""
    of_losses = program.feeding(scope, set(program.losses(scope)))
    for node, keeper, part in _kept(program, region, name):
        base = keeper.partition("[")[0]
        is_of_self = base.startswith("self.")
        outlives = is_of_self or (region is not scope and base.isidentifier() and base not in of_losses)
        if not outlives or not _starts_empty(program, keeper) or _is_cleared(program, region, keeper):
            continue
        if is_of_self and any(
            _is_cleared(program, function, base)
            for functions in program.functions.values()
            for function in functions
            if function.name != "__init__"
        ):
            continue
        if is_of_self and _feeds_backward(program, base):
            continue
        yield node, keeper, part


def _feeds_backward(program: ParsedProgram, attribute: str) -> bool:
    """Say whether a function reads an attribute and has a backward pass."""
    for functions in program.functions.values():
        for function in functions:
            reads = [
                node for node in program.own(function) if isinstance(node, ast.Attribute) and ast.unparse(node) == attribute
            ]
            used = [node for node in reads if not _is_growth(program, node)]
            if used and any(isinstance(node, ast.Attribute) and "backward" in node.attr for node in program.own(function)):
                return True
    return False


def _is_growth(program: ParsedProgram, node: ast.AST) -> bool:
    around = next(program.around(node))
    return isinstance(around, ast.AugAssign) or (isinstance(around, ast.Attribute) and around.attr == "append")


@rule("NBG101", "loss-kept", bad="total += loss", good="total += loss.detach()")
def loss_kept(program: ParsedProgram) -> Iterator[Hit]:
    """A loss is added up or appended after its backward pass, together with its graph.

    Each step leaves nodes of autograd in memory that nothing will use.
    """
    for region, scope, loss in _regions(program):
        if (loss not in program.bound(region) and "." not in loss) or _is_detached(program, region, loss):
            continue
        for node, keeper, part in _keepers(program, region, scope, loss):
            message = f"`{keeper}` keeps the graph of each step's `{loss}`; keep `{loss}.detach()` or `{loss}.item()`"
            yield Hit(node, message, put_behind(part, ".detach()"))


@rule("NBG102", "output-kept", bad="outputs.append(output)", good="outputs.append(output.detach())")
def output_kept(program: ParsedProgram) -> Iterator[Hit]:
    """An output of the model that goes into the loss is kept over the steps, together with its graph."""
    for region, scope, loss in _regions(program):
        if region is scope:
            continue
        for name in program.feeding(region, {loss}) - {loss}:
            made = [
                node.value
                for node in program.own(region)
                if isinstance(node, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            ]
            calls = [value for value in made if isinstance(value, ast.Call) and is_trained(program, ast.unparse(value.func))]
            if not made or len(calls) != len(made) or _is_detached(program, region, name):
                continue
            for node, keeper, part in _keepers(program, region, scope, name):
                message = f"`{keeper}` keeps each step's `{name}` with its graph; keep `{name}.detach()`"
                yield Hit(node, message, put_behind(part, ".detach()"))


def is_trained(program: ParsedProgram, name: str) -> bool:
    """Say whether a name is of a model that the file trains. It asks for its parameters, or sets its mode."""
    asked = ("parameters", "train", "eval")
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in asked and ast.unparse(call.func.value) == name
        for call in program.calls
    )


@rule("NBG103", "state-carried", bad="output, state = model(x, state)", good="output, state = model(x, state.detach())")
def state_carried(program: ParsedProgram) -> Iterator[Hit]:
    """A recurrent state goes into the next step with its graph.

    With `retain_graph=True` the backward pass goes through all earlier steps: time and memory per step grow.
    """
    for call in _retaining(program):
        for name, made in _carried(program, call):
            yield Hit(made, f"`{name}` carries the graph of all earlier steps into the next one; take `{name}.detach()` there")


def _carried(program: ParsedProgram, backward: ast.Call) -> Iterator[tuple[str, ast.Call]]:
    """Yield the names that a model makes from themselves in the loop of a backward pass, with the call."""
    for loop in program.loops(backward)[:1]:
        for node in program.own(loop):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call(args=args) as made):
                    pass
                case ast.Assign(targets=[ast.Name() as target], value=ast.Call(args=args) as made):
                    targets = [target]
                case _:
                    continue
            read = {arg.id for arg in args if isinstance(arg, ast.Name)}
            for name in read & {target.id for target in targets if isinstance(target, ast.Name)}:
                is_only = program.binds_once(loop, name) and not _is_detached(program, loop, name)
                if is_only and is_trained(program, ast.unparse(made.func)):
                    yield name, made


def _retaining(program: ParsedProgram) -> Iterator[ast.Call]:
    for call in program.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and is_true(call, "retain_graph"):
            yield call


def is_true(call: ast.Call, option: str) -> bool:
    """Say whether a call has an option that is `True` as written."""
    return any(
        word.arg == option and isinstance(word.value, ast.Constant) and word.value.value is True for word in call.keywords
    )


@rule("NBG104", "graph-retained", bad="loss.backward(retain_graph=True)", good="loss.backward()")
def graph_retained(program: ParsedProgram) -> Iterator[Hit]:
    """`retain_graph=True` in a loop keeps the activations of a pass until the next one has made its own.

    Nothing goes through the graph a second time.
    """
    for call in _retaining(program):
        loss = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        for loop in program.loops(call)[:1]:
            passes = [node for node in program.own(loop) if isinstance(node, ast.Attribute) and node.attr in _PASSES]
            is_only = len(passes) == 1 and loss in program.bound(loop) and not any(_carried(program, call))
            if is_only and _needs_nothing_from_outside(program, loop, loss):
                yield Hit(
                    call,
                    f"`retain_graph=True` keeps the activations of `{loss}` for a second pass that never comes; leave it out",
                )


_PASSES = frozenset(["backward", "grad", "manual_backward"])


def _needs_nothing_from_outside(program: ParsedProgram, loop: Loop, loss: str) -> bool:
    """Say whether a loss is computed in its loop from models, losses and data alone, none with a graph from before."""
    feeding = program.feeding(loop, {loss})
    outside = feeding - program.bound(loop)
    called = {ast.unparse(call.func).partition(".")[0] for call in program.own_calls(loop)}
    over = {program.looped_over(each).partition(".")[0] for each in (loop, *program.loops(loop))}
    numbers = {"i", "epoch", "step", "device", "len", "range", "enumerate", "tqdm", "int", "float", "torch", "F", "nn"}
    targets = {name for each in program.loops(loop) for name in program.bound(each)}
    if any(name.startswith("self") for name in outside):
        return False
    return not outside - called - over - numbers - targets and bool(feeding - {loss})


@rule(
    "NBG105",
    "gradient-with-graph",
    bad="loss.backward(create_graph=True)",
    good="torch.autograd.grad(loss, params, create_graph=True)",
)
def gradient_with_graph(program: ParsedProgram) -> Iterator[Hit]:
    """`backward(create_graph=True)` gives each parameter a gradient whose graph leads back to the parameter.

    Python cannot collect this cycle. `torch.autograd.grad` returns the gradients instead, and `.grad = None` ends the cycle.
    """
    for call in program.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
            continue
        clears = any(
            isinstance(node, ast.Attribute)
            and (node.attr == "zero_grad" or (node.attr == "grad" and isinstance(node.ctx, (ast.Store, ast.Del))))
            for node in program.nodes
        )
        if is_true(call, "create_graph") and not clears:
            message = (
                "the gradients keep a graph that leads back to their parameters, a cycle for good; take `torch.autograd.grad`"
            )
            yield Hit(call, message)


@rule("NBG106", "activations-kept", bad="activations.append(output)", good="activations.append(output.detach())")
def activations_kept(program: ParsedProgram) -> Iterator[Hit]:
    """A forward hook appends each output, with its graph, to a list that nothing empties."""
    for call in program.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "register_forward_hook" and call.args):
            continue
        hook = call.args[0]
        functions: list[ast.AST] = [*program.functions.get(hook.id, [])] if isinstance(hook, ast.Name) else [hook]
        for function in functions:
            parameters = function.args.args if isinstance(function, (Function, ast.Lambda)) else []
            if len(parameters) != 3 or program.may_lack_gradients(call):
                continue
            for node, keeper, _ in _kept(program, function, parameters[2].arg):
                cleared = any(_is_cleared(program, scope, keeper) for scope in _scopes(program))
                starts = keeper.isidentifier() and isinstance(next(iter(program.assigned(keeper)), None), ast.List)
                if starts and not cleared and len(program.assigned(keeper)) == 1 and not _reads_gradient(program):
                    yield Hit(
                        node,
                        f"`{keeper}` grows with each call of the model and keeps its graph; append `.detach()`, and empty it",
                    )


def _scopes(program: ParsedProgram) -> Iterator[ast.AST]:
    yield from (each for functions in program.functions.values() for each in functions)
    yield from (node for node in program.nodes if isinstance(node, (ast.For, ast.While)))


def _reads_gradient(program: ParsedProgram) -> bool:
    attributes = {node.attr for node in program.nodes if isinstance(node, ast.Attribute)}
    return bool(attributes & {"retain_grad", "register_full_backward_hook", "no_grad", "inference_mode"})


@rule("NBG107", "step-output-kept", bad="self.losses.append(loss)", good="self.losses.append(loss.detach())")
def step_output_kept(program: ParsedProgram) -> Iterator[Hit]:
    """`training_step` of a Lightning module appends the loss that it returns, with its graph.

    Nothing empties the list.
    """
    for step in program.functions.get("training_step", []):
        made = next((each for each in program.around(step) if isinstance(each, ast.ClassDef)), None)
        if made is None or not any("LightningModule" in program.name(base) for base in made.bases):
            continue
        for node in program.own(step):
            if not (isinstance(node, ast.Return) and node.value is not None):
                continue
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            for loss in [value.id for value in values if isinstance(value, ast.Name)]:
                for place, keeper, part in _kept(program, step, loss):
                    methods = [each for each in made.body if isinstance(each, Function) and each.name != "__init__"]
                    is_cleared = any(_is_cleared(program, each, keeper) for each in methods)
                    if keeper.startswith("self.") and not is_cleared and not _is_detached(program, step, loss):
                        message = f"`{keeper}` keeps each step's `{loss}` with its graph; append `{loss}.detach()`"
                        yield Hit(place, message, put_behind(part, ".detach()"))
