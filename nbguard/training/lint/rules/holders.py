"""Holders. Hooks, caches, errors, outputs of cells, figures and copies that keep models and tensors alive."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbguard.cell_names import names_of
from nbguard.training.lint.program import Function, Hit, ParsedProgram, put_behind, rule
from nbguard.training.lint.rules.graphs import is_trained

_CACHES = frozenset(["functools.lru_cache", "functools.cache"])
_HOOKS = frozenset(
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_backward_hook",
    ]
)


@rule(
    "NBG201",
    "cached-method",
    bad="@lru_cache\ndef mask(self, n): ...",
    good="def mask(self, n): ...  # the table in a buffer, or a dict of its own",
)
def cached_method(program: ParsedProgram) -> Iterator[Hit]:
    """`lru_cache` on a method of a module, or on a function that gets a model, keeps each model that it was called with.

    The cache belongs to the class or the function and lives until the kernel ends.
    """
    for functions in program.functions.values():
        for function in functions:
            decorators = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
            cache = next((each for each in decorators if program.name(each) in _CACHES), None)
            if cache is None or not function.args.args:
                continue
            parents = [each for each in program.around(function) if isinstance(each, ast.ClassDef)]
            first = function.args.args[0].arg
            if parents and first == "self" and program.is_module(parents[0]):
                yield Hit(cache, f"the cache of `{function.name}` keeps every `{parents[0].name}` alive that it was called on")
            elif not parents and (name := _model_given(program, function)):
                yield Hit(cache, f"the cache of `{function.name}` keeps each `{name}` alive that it was given")


def _model_given(program: ParsedProgram, function: Function) -> str:
    """Return the name of a model that calls give to a function; empty where none is sure to be one."""
    for call in program.callers(function):
        for argument in call.args:
            made = program.made(argument.id) if isinstance(argument, ast.Name) else []
            for value in made:
                called = program.name(value.func)
                if called.startswith("torch.nn.") or (called in program.classes and program.is_module(program.classes[called])):
                    return argument.id if isinstance(argument, ast.Name) else ""
    return ""


@rule(
    "NBG202", "error-kept", bad="except RuntimeError as error:\n    errors.append(error)", good="    errors.append(str(error))"
)
def error_kept(program: ParsedProgram) -> Iterator[Hit]:
    """A caught error of a training is kept. Its traceback keeps the frames, and these the batch, the outputs and the graph."""
    for handler in program.nodes:
        if not (isinstance(handler, ast.ExceptHandler) and handler.name):
            continue
        around = next(program.around(handler))
        tried = ast.Module(body=getattr(around, "body", []), type_ignores=[])
        if not any(_computes(program, node) for node in ast.walk(tried)):
            continue
        drops = any(
            isinstance(node, ast.Attribute) and node.attr in ("with_traceback", "__traceback__", "clear_frames")
            for node in ast.walk(handler)
        )
        for node in program.own(handler):
            match node:
                case ast.Call(func=ast.Attribute(value=keeper, attr="append"), args=[ast.Name(id=name)]) if (
                    name == handler.name
                ):
                    pass
                case ast.Assign(targets=[ast.Subscript(value=keeper)], value=ast.Name(id=name)) if name == handler.name:
                    pass
                case _:
                    continue
            if not drops:
                yield Hit(node, f"`{ast.unparse(keeper)}` keeps the frames of the error and their tensors; keep `str({name})`")


def _computes(program: ParsedProgram, node: ast.AST) -> bool:
    """Say whether a node trains, or moves something to the device."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name))):
        return False
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method in ("backward", "cuda", "fine_tune", "fit_one_cycle") or is_trained(program, ast.unparse(node.func))


@rule(
    "NBG203",
    "hook-each-step",
    bad="layer.register_forward_hook(hook)  # in the loop",
    good="handle = layer.register_forward_hook(hook)  # once, before the loop",
)
def hook_each_step(program: ParsedProgram) -> Iterator[Hit]:
    """A hook is registered in each step of a training, and its handle is dropped. Each call of the model runs all of them."""
    for call in _dropped_hooks(program):
        loops = program.loops(call)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        root = ast.unparse(owner).partition(".")[0].partition("[")[0]
        for loop in loops[:1]:
            trains = any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in program.own(loop))
            if trains and root not in program.bound(loop) and not program.is_conditional(call, loop):
                yield Hit(
                    call,
                    f"each step adds one more hook to `{ast.unparse(owner)}`; register it once, or remove it by its handle",
                )


def _dropped_hooks(program: ParsedProgram) -> Iterator[ast.Call]:
    for node in program.nodes:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method)) as call) if method in _HOOKS:
                yield call


@rule(
    "NBG204",
    "hook-each-run",
    bad="model.register_forward_hook(hook)",
    good="handle = model.register_forward_hook(hook)  # handle.remove() before the next one",
    in_notebooks_only=True,
)
def hook_each_run(program: ParsedProgram) -> Iterator[Hit]:
    """A cell registers a hook on a model of another cell and drops the handle. Each run of the cell adds one more."""
    for call in _dropped_hooks(program):
        if not isinstance(program.scope(call), ast.Module) or not isinstance(call.func, ast.Attribute):
            continue
        roots = names_of(ast.Expr(value=call.func.value)).read
        for loop in program.loops(call):
            if isinstance(loop, (ast.For, ast.AsyncFor)):
                roots = roots - program.bound(loop) | names_of(ast.Expr(value=loop.iter)).read
        cell = program.source.cell_of(call)
        here = [node for node in program.tree.body if program.source.cell_of(node) == cell]
        made_here = {name for node in here for name in program.bound(node)}
        trains = any(program.losses(loop) for loop in program.loops(call))
        drops = trains or any(
            isinstance(node, ast.Attribute) and node.attr in ("_forward_hooks", "_backward_hooks") for node in program.nodes
        )
        made = {name for name in roots if name not in made_here and program.assigned(name)}
        if made and not roots & made_here and not drops:
            yield Hit(
                call, f"each run of this cell adds one more hook to `{min(made)}`; keep the handle, and remove the hook first"
            )


@rule("NBG205", "model-in-out", bad="model.to(device)", good="model.to(device);", in_notebooks_only=True)
def model_in_out(program: ParsedProgram) -> Iterator[Hit]:
    """A cell ends with an expression that is the model itself, so `Out` keeps it.

    Later the notebook deletes the model, or makes another one under its name, and the first one stays in memory.
    """
    bodies: dict[int | None, ast.stmt] = {program.source.cell_of(node): node for node in program.tree.body}
    for cell, last in bodies.items():
        match last:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="to" | "cuda" | "eval" | "train" | "half" | "float")
                )
            ):
                pass
            case ast.Expr(value=ast.Name(id=name)):
                pass
            case _:
                continue
        line = program.source.lines[(last.end_lineno or 1) - 1].encode()[last.end_col_offset or 0 :]
        if not is_trained(program, name) or not program.made(name) or b";" in line or not _is_module_name(program, name):
            continue
        if _ends_later(program, cell, name):
            yield Hit(
                last, f"`Out` keeps this `{name}` after its name is given up; end the line with `;`", put_behind(last, ";")
            )


def _is_module_name(program: ParsedProgram, name: str) -> bool:
    """Say whether all values of a name are modules of PyTorch, as far as the file shows."""
    for value in program.made(name):
        called = program.name(value.func)
        is_own = called in program.classes and program.is_module(program.classes[called])
        if not (is_own or called.startswith(("torch.nn.", "torchvision.models.")) or called.endswith(".from_pretrained")):
            return False
    return True


def _ends_later(program: ParsedProgram, cell: int | None, name: str) -> bool:
    """Say whether a cell below deletes a name, or makes something new under it."""
    for node in program.tree.body:
        place = program.source.cell_of(node)
        if place is None or cell is None or place <= cell:
            continue
        match node:
            case ast.Delete(targets=targets) if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return True
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as value) if (
                target == name and name not in names_of(value).read
            ):
                return True
    return False


@rule("NBG206", "figures-kept", bad="plt.figure(); plt.plot(x); plt.savefig(file)", good="…; plt.close()")
def figures_kept(program: ParsedProgram) -> Iterator[Hit]:
    """A loop makes figures, saves them and closes none. Pyplot keeps each, with the arrays that are drawn in it."""
    for call in program.calls:
        if program.name(call.func) not in ("matplotlib.pyplot.figure", "matplotlib.pyplot.subplots"):
            continue
        for loop in program.loops(call)[:1]:
            if any(word.arg in ("num", "clear") for word in call.keywords) or (
                program.name(call.func).endswith("figure") and call.args
            ):
                continue
            names = {getattr(node, "attr", "") for node in program.reached(loop) if isinstance(node, ast.Attribute)}
            saves = "savefig" in {getattr(node, "attr", "") for node in program.own(loop)}
            if saves and not names & {"close", "show", "clf"} and not _is_short(loop):
                yield Hit(call, "each round leaves one more figure open, with its data; close it, as in `plt.close()`")


def _is_short(loop: ast.AST) -> bool:
    """Say whether a loop has few rounds, as its source shows."""
    match loop:
        case ast.For(iter=ast.List(elts=parts) | ast.Tuple(elts=parts)):
            return len(parts) < 20
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))])):
            return count < 20
    return False


@rule(
    "NBG207",
    "checkpoint-kept",
    bad='checkpoint = torch.load(file, map_location="cuda")',
    good='checkpoint = torch.load(file, map_location="cpu")',
)
def checkpoint_kept(program: ParsedProgram) -> Iterator[Hit]:
    """A checkpoint is loaded onto the device, copied into the model, and stays there under its name.

    The weights are on the device twice.
    """
    for node in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(keywords=keywords) as call) if (
                program.name(call.func) == "torch.load"
            ):
                onto = next((word.value for word in keywords if word.arg == "map_location"), None)
            case _:
                continue
        on_device = isinstance(onto, ast.Constant) and str(onto.value).startswith("cuda")
        if not on_device or not isinstance(program.scope(node), ast.Module):
            continue
        reads = [
            each
            for each in program.nodes
            if isinstance(each, ast.Name) and each.id == name and not isinstance(each.ctx, ast.Store)
        ]
        if reads and len(program.assigned(name)) == 1 and all(_is_loaded(program, each) for each in reads):
            yield Hit(
                call,
                f'`{name}` keeps a second copy of the weights on the device; load it with `map_location="cpu"`, or delete it',
            )


def _is_loaded(program: ParsedProgram, node: ast.AST) -> bool:
    """Say whether a name goes into `load_state_dict`, whole or in part."""
    around = next(program.around(node))
    if isinstance(around, ast.Subscript):
        around = next(program.around(around))
    return isinstance(around, ast.Call) and isinstance(around.func, ast.Attribute) and around.func.attr == "load_state_dict"


@rule(
    "NBG208",
    "copies-kept",
    bad="copies.append(copy.deepcopy(model))",
    good="best = copy.deepcopy(model.state_dict())  # of the best epoch alone",
)
def copies_kept(program: ParsedProgram) -> Iterator[Hit]:
    """Each epoch appends a copy of the model. At most the last one is ever read, and all others stay on the device."""
    for call in program.calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=keeper), attr="append"), args=[ast.Call(args=[ast.Name(id=model)]) as made]
            ):
                pass
            case _:
                continue
        is_copy = program.name(made.func) == "copy.deepcopy" and is_trained(program, model)
        loops = program.loops(call)
        reads = [
            node
            for node in program.nodes
            if isinstance(node, ast.Name) and node.id == keeper and isinstance(node.ctx, ast.Load)
        ]
        if is_copy and loops and keeper not in program.bound(loops[-1]) and all(_is_last(program, read) for read in reads):
            yield Hit(
                call,
                f"`{keeper}` keeps a copy of `{model}` for each round, and at most the last one is read; keep that one alone",
            )


def _is_last(program: ParsedProgram, node: ast.AST) -> bool:
    around = next(program.around(node))
    return (isinstance(around, ast.Attribute) and around.attr == "append") or (
        isinstance(around, ast.Subscript) and ast.unparse(around.slice) == "-1"
    )
