"""Steps. Optimizers, schedulers and states that train something else than is meant."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbguard.cell_names import names_of
from nbguard.training.lint.program import Hit, Loop, ParsedProgram, put_around, rule
from nbguard.training.lint.rules.graphs import is_true
from nbguard.training.lint.rules.waits import each_step, training_loops

_OPTIMIZERS = "torch.optim."
_SCHEDULERS = "torch.optim.lr_scheduler."


def _number(node: ast.expr | None) -> float | None:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) else None


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    found = next((word.value for word in call.keywords if word.arg == name), None)
    return found or (call.args[place] if len(call.args) > place else None)


@rule(
    "NBG501",
    "scheduler-per-batch",
    bad="for batch in loader:\n    …\n    scheduler.step()",
    good="for batch in loader: …\nscheduler.step()",
)
def scheduler_per_batch(program: ParsedProgram) -> Iterator[Hit]:
    """A scheduler whose settings count epochs steps once per batch.

    The learning rate is almost 0 after a few batches or epochs.
    """
    for loop in training_loops(program):
        epochs = [each for each in program.loops(loop) if program.is_over_epochs(each)]
        if not epochs or not isinstance(epochs[0], ast.For):
            continue
        for call in each_step(program, loop):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                made = program.made(ast.unparse(call.func.value))
                if made and all(_counts_epochs(program, value, epochs[0]) for value in made):
                    kind = program.name(made[0].func).rpartition(".")[2]
                    yield Hit(
                        call, f"`{kind}` counts epochs and steps once per batch here; step it after the loop over the batches"
                    )


def _counts_epochs(program: ParsedProgram, made: ast.Call, epochs: ast.For) -> bool:
    """Say whether a scheduler's settings are of epochs for certain."""
    counted = [ast.unparse(argument) for argument in epochs.iter.args] if isinstance(epochs.iter, ast.Call) else []
    total = _number(epochs.iter.args[-1]) if isinstance(epochs.iter, ast.Call) and epochs.iter.args else None
    match program.name(made.func).removeprefix(_SCHEDULERS):
        case "ExponentialLR":
            return (_number(_argument(made, 1, "gamma")) or 1) <= 0.98
        case "StepLR":
            size, gamma = _number(_argument(made, 1, "step_size")), _number(_argument(made, 2, "gamma"))
            return size is not None and size <= min(total or 20, 50) and (gamma or 0.1) <= 0.9
        case "CosineAnnealingLR":
            period = _argument(made, 1, "T_max")
            return period is not None and ast.unparse(period) in counted
        case "MultiStepLR":
            places = _argument(made, 1, "milestones")
            steps = [_number(each) for each in places.elts] if isinstance(places, ast.List) else []
            return bool(steps) and total is not None and all(step is not None and step <= total for step in steps)
    return False


def _optimized(program: ParsedProgram, call: ast.Call) -> str:
    """Return the model whose parameters alone an optimizer gets; empty where it is not known."""
    if not program.name(call.func).startswith(_OPTIMIZERS) or program.name(call.func).startswith(_SCHEDULERS) or not call.args:
        return ""
    match call.args[0]:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=model), attr="parameters")):
            return model
    return ""


@rule(
    "NBG502",
    "optimizer-of-earlier-model",
    bad="model = Net()  # below opt = SGD(model.parameters())",
    good="model = Net()\nopt = SGD(model.parameters())",
)
def optimizer_of_earlier_model(program: ParsedProgram) -> Iterator[Hit]:
    """A new model is made under the same name, and the optimizer of the first one goes on.

    The new model is never trained, and the first one stays in memory.
    """
    for optimizer, model, rest in _made_optimizers(program):
        for later in rest:
            if optimizer in program.bound(later):
                break
            match later:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as value) if target == model and _makes_new(
                    program, value, model
                ):
                    after = rest[rest.index(later) + 1 :]
                    if _steps_before_new(program, after, optimizer):
                        yield Hit(
                            later, f"`{optimizer}` still has the parameters of the earlier `{model}`; make a new one, too"
                        )
                    break
    yield from _made_in_loop(program)


def _made_optimizers(program: ParsedProgram) -> Iterator[tuple[str, str, list[ast.stmt]]]:
    """Yield each optimizer that is made, with its model, and the statements that follow in its block."""
    for block in _blocks(program):
        for place, node in enumerate(block):
            match node:
                case ast.Assign(targets=[ast.Name(id=optimizer)], value=ast.Call() as call) if model := _optimized(
                    program, call
                ):
                    yield optimizer, model, block[place + 1 :]


def _blocks(program: ParsedProgram) -> Iterator[list[ast.stmt]]:
    for node in program.nodes:
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _makes_new(program: ParsedProgram, value: ast.Call, model: str) -> bool:
    """Say whether a call makes a new model of a class of PyTorch or of the file, and not out of the earlier model."""
    name = program.name(value.func)
    is_class = (name in program.classes and program.is_module(program.classes[name])) or name.startswith(
        ("torch.nn.", "torchvision.models.")
    )
    return is_class and model not in names_of(value).read


def _steps_before_new(program: ParsedProgram, rest: list[ast.stmt], optimizer: str) -> bool:
    """Say whether an optimizer steps in statements before its name is bound again."""
    for node in rest:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if optimizer in program.bound(node):
            return False
        if any(
            isinstance(call.func, ast.Attribute) and call.func.attr == "step" and ast.unparse(call.func.value) == optimizer
            for call in program.own_calls(node)
        ):
            return True
    return False


def _made_in_loop(program: ParsedProgram) -> Iterator[Hit]:
    """Yield models that a loop makes again while the optimizer of before steps."""
    for optimizer, model, rest in _made_optimizers(program):
        for loop in rest:
            if optimizer in program.bound(loop):
                break
            if not isinstance(loop, ast.For):
                continue
            for node in loop.body:
                match node:
                    case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as value) if target == model and _makes_new(
                        program, value, model
                    ):
                        if _steps_before_new(program, loop.body, optimizer):
                            yield Hit(
                                node, f"`{optimizer}` still has the parameters of the earlier `{model}`; make a new one, too"
                            )


@rule(
    "NBG503",
    "layer-not-in-optimizer",
    bad="opt = SGD(model.parameters())\nmodel.fc = nn.Linear(512, 10)",
    good="model.fc = nn.Linear(512, 10)\nopt = SGD(model.parameters())",
)
def layer_not_in_optimizer(program: ParsedProgram) -> Iterator[Hit]:
    """A model gets a new layer after its optimizer was made.

    The optimizer does not know the layer, so it is never trained.
    """
    for optimizer, model, rest in _made_optimizers(program):
        for place, later in enumerate(rest):
            if optimizer in program.bound(later) or model in program.bound(later):
                break
            match later:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner))], value=ast.Call() as value) if (
                    owner == model and _has_weights(program, value)
                ):
                    adds = any(isinstance(node, ast.Attribute) and node.attr == "add_param_group" for node in program.nodes)
                    if not adds and _steps_before_new(program, rest[place + 1 :], optimizer):
                        yield Hit(
                            later, f"`{optimizer}` was made before this layer and never trains it; make the optimizer below"
                        )


def _has_weights(program: ParsedProgram, value: ast.Call) -> bool:
    name = program.name(value.func).removeprefix("torch.nn.")
    return name in ("Linear", "Conv2d", "Sequential", "LazyLinear", "Embedding")


@rule("NBG504", "gradients-not-zeroed", bad="loss.backward(); opt.step()", good="opt.zero_grad(); loss.backward(); opt.step()")
def gradients_not_zeroed(program: ParsedProgram) -> Iterator[Hit]:
    """A loop steps an optimizer after each backward pass, and nothing in it sets the gradients back.

    Each step adds to the gradients of all earlier ones.
    """
    for loop in program.nodes:
        if not isinstance(loop, Loop):
            continue
        for call in each_step(program, loop):
            if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step" and not call.args):
                continue
            made = program.made(ast.unparse(call.func.value))
            known = made and all(
                program.name(value.func).startswith(_OPTIMIZERS)
                and not program.name(value.func).startswith(_SCHEDULERS)
                and not _may_get_new_tensors(program, value, loop)
                for value in made
            )
            passes = [each for calls in program.losses(loop).values() for each in calls]
            straight = passes and all(
                program.loops(each)[:1] == [loop] and not program.is_conditional(each, loop) for each in passes
            )
            if known and straight and not _zeroes(program, loop):
                yield Hit(
                    call,
                    f"the gradients add up over the steps; call `{ast.unparse(call.func.value)}.zero_grad()` in each",
                )


def _may_get_new_tensors(program: ParsedProgram, made: ast.Call, loop: Loop) -> bool:
    """Say whether a loop makes an optimizer and may make its tensors, which have no gradients then."""
    model = _optimized(program, made)
    return loop in program.around(made) and (not model or model in program.bound(loop))


def _zeroes(program: ParsedProgram, loop: Loop) -> bool:
    """Say whether anything that runs in a loop, or in the loops around it, may set gradients back."""
    for region in (loop, *program.loops(loop)):
        for node in program.reached(region):
            if isinstance(node, ast.Attribute) and ("zero" in node.attr or node.attr == "grad"):
                return True
            if isinstance(node, ast.Name) and "zero" in node.id:
                return True
    return False


@rule("NBG505", "best-weights-not-copied", bad="best = model.state_dict()", good="best = copy.deepcopy(model.state_dict())")
def best_weights_not_copied(program: ParsedProgram) -> Iterator[Hit]:
    """The best weights are kept as `model.state_dict()`, whose tensors are the model's own.

    Further steps change them, and the last weights are loaded as the best ones.
    """
    for node in program.nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=kept)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=model), attr="state_dict"), args=[]) as call,
            ):
                pass
            case _:
                continue
        loops = program.loops(node)
        outer = [loop for loop in loops if program.is_conditional(node, loop) and _trains(program, loop)]
        uses = [
            each
            for each in program.calls
            if isinstance(each.func, ast.Attribute)
            and each.func.attr == "load_state_dict"
            and any(isinstance(argument, ast.Name) and argument.id == kept for argument in each.args)
        ]
        copied = any(
            isinstance(value, ast.Call) and program.name(value.func).endswith("deepcopy") and kept in names_of(value).read
            for value in program.assigned(kept)
        )
        later = [
            use for use in uses if program.scope(use) is program.scope(node) and not set(program.loops(use)) & set(outer[-1:])
        ]
        if outer and later and not copied and model not in program.bound(outer[-1]):
            copy = next(
                (
                    alias if name.endswith("deepcopy") else f"{alias}.deepcopy"
                    for alias, name in program.aliases.items()
                    if name in ("copy", "copy.deepcopy")
                ),
                "",
            )
            message = f"`{kept}` has the model's own tensors, which further steps change; keep a copy, as by `copy.deepcopy`"
            yield Hit(node, message, put_around(call, f"{copy}(", ")") if copy else ())


def _trains(program: ParsedProgram, loop: ast.AST) -> bool:
    """Say whether a loop, or a function that it calls, has a backward pass."""
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in program.reached(loop))


@rule(
    "NBG506",
    "leaf-moved",
    bad="torch.zeros(n, requires_grad=True).to(device)",
    good="torch.zeros(n, device=device, requires_grad=True)",
)
def leaf_moved(program: ParsedProgram) -> Iterator[Hit]:
    """A tensor that is to be trained is moved or converted after `requires_grad=True`.

    The result is no leaf: no gradient arrives in it, and an optimizer refuses it. `torch.autograd.grad` takes it as it is.
    """
    for call in program.calls:
        match call:
            case (
                ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="cuda" | "half" | "double"))
                | ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="to"), args=[_, *_])
            ) if program.name(made.func).startswith("torch."):
                parent = next(program.around(call))
                if is_true(made, "requires_grad") and isinstance(parent, ast.Assign) and _is_trained(program, parent):
                    yield Hit(
                        call,
                        "the result is no leaf, and no gradient arrives in it; ask for gradients after the move",
                    )


def _is_trained(program: ParsedProgram, assignment: ast.Assign) -> bool:
    """Say whether the file reads the gradient of a tensor that it assigns, or gives the tensor to an optimizer."""
    target = ast.unparse(assignment.targets[0])
    where = program.scope(assignment) if isinstance(assignment.targets[0], ast.Name) else program.tree
    for node in ast.walk(where):
        match node:
            case ast.Attribute(value=value, attr="grad"):
                given: list[ast.AST] = [value]
            case ast.Call() if program.name(node.func).startswith(_OPTIMIZERS):
                given = [each for argument in ast.iter_child_nodes(node) for each in ast.walk(argument)]
            case _:
                continue
        if any(isinstance(each, (ast.Name, ast.Attribute)) and ast.unparse(each) == target for each in given):
            return True
    return False


@rule(
    "NBG507",
    "optimizer-made-each-step",
    bad="for batch in loader:\n    opt = Adam(model.parameters())",
    good="opt = Adam(model.parameters())\nfor batch in loader: …",
)
def optimizer_made_each_step(program: ParsedProgram) -> Iterator[Hit]:
    """Each step makes a new optimizer.

    Moments and step counts begin at 0 each time, and are allocated each time.
    """
    for loop in training_loops(program):
        for call in each_step(program, loop):
            model = _optimized(program, call)
            name = program.name(call.func).rpartition(".")[2]
            if (
                model
                and model not in program.bound(loop)
                and (name != "SGD" or any(word.arg == "momentum" for word in call.keywords))
            ):
                yield Hit(call, f"each step makes `{name}` again, and its moments begin at 0; make it before the loop")
