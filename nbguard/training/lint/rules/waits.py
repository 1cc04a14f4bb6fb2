"""Waits. Lines that make each step of a training slower than it has to be."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbguard.training.lint.program import Function, Hit, Loop, ParsedProgram, put_around, put_behind_arguments, rule
from nbguard.training.lint.rules.graphs import is_trained
from nbguard.training.lint.source import Edit


def training_loops(program: ParsedProgram) -> Iterator[Loop]:
    """Yield the loops over batches that have a backward pass."""
    for loop in program.nodes:
        if isinstance(loop, Loop) and program.losses(loop) and program.is_over_batches(loop):
            yield loop


def each_step(program: ParsedProgram, loop: Loop) -> Iterator[ast.Call]:
    """Yield the calls that every step of a loop makes, whatever happens, and not in a loop inside."""
    for call in program.own_calls(loop):
        if program.loops(call)[:1] == [loop] and not program.is_conditional(call, loop):
            yield call


@rule(
    "NBG401",
    "item-per-element",
    bad="for i in range(len(t)): total += t[i].item()",
    good="for value in t.tolist(): total += value",
)
def item_per_element(program: ParsedProgram) -> Iterator[Hit]:
    """A loop takes one element after the other out of a tensor with `.item()`.

    On a GPU Python waits for each of these copies; `.tolist()` copies all at once.
    """
    for call in program.calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=index)), attr="item"), args=[]
            ):
                pass
            case _:
                continue
        for loop in program.loops(call)[:1]:
            match loop:
                case ast.For(target=ast.Name(id=target), iter=ast.Call(func=ast.Name(id="range"), args=[*_, end])) if (
                    target == index
                    and name not in program.bound(loop)
                    and (program.number(end) or 100) > 20
                    and _is_tensor(program, name)
                ):
                    yield Hit(
                        call, f"each round waits for one element of `{name}`; copy all of them at once with `{name}.tolist()`"
                    )


def _is_tensor(program: ParsedProgram, name: str) -> bool:
    """Say whether all values of a name come from PyTorch or a model, and none is an array."""
    values = program.assigned(name)
    texts = [ast.unparse(value) for value in values]
    known = [
        isinstance(value, ast.Call)
        and (program.name(value.func).startswith("torch.") or is_trained(program, ast.unparse(value.func)))
        for value in values
    ]
    return bool(values) and all(known) and not any("numpy" in text or "tolist" in text for text in texts)


@rule("NBG402", "item-twice", bad="total += loss.item()\nlog(loss.item())", good="value = loss.item()")
def item_twice(program: ParsedProgram) -> Iterator[Hit]:
    """A step reads the same value from the device more than once; each `.item()` waits for the device and copies."""
    for loop in training_loops(program):
        seen: dict[str, ast.Call] = {}
        reads = [call for call in each_step(program, loop) if isinstance(call.func, ast.Attribute) and call.func.attr == "item"]
        for call in sorted(reads, key=lambda call: (call.lineno, call.col_offset)):
            read = ast.unparse(call)
            if (
                read in seen
                and isinstance(call.func, ast.Attribute)
                and isinstance(call.func.value, ast.Name)
                and program.binds_once(loop, call.func.value.id)
            ):
                yield Hit(call, f"`{read}` is read from the device once more in the same step; keep its value in a variable")
            seen[read] = call


@rule("NBG403", "tensor-printed", bad="print(loss)", good="if step % 100 == 0: print(loss.item())")
def tensor_printed(program: ParsedProgram) -> Iterator[Hit]:
    """Each step prints a loss. Python waits for the device in each of them, and formats a tensor."""
    for loop in training_loops(program):
        for call in each_step(program, loop):
            if program.name(call.func) != "print":
                continue
            shown = [
                node
                for argument in call.args
                for node in ast.walk(argument)
                if isinstance(node, ast.Name) and node.id in program.losses(loop)
            ]
            whole = [
                node
                for node in shown
                if not isinstance(next(program.around(node)), (ast.Attribute, ast.Call)) or next(program.around(node)) is call
            ]
            if whole:
                yield Hit(call, f"each step waits for the device to print `{whole[0].id}`; print now and then")


@rule(
    "NBG404",
    "workers-started-each-epoch",
    bad="DataLoader(data, num_workers=4)",
    good="DataLoader(data, num_workers=4, persistent_workers=True)",
)
def workers_started_each_epoch(program: ParsedProgram) -> Iterator[Hit]:
    """A loader with workers is gone through once per epoch, and all of its workers start again in each.

    `persistent_workers=True` keeps them.
    """
    for call, name in _loaders(program):
        if any(word.arg in ("persistent_workers", None) for word in call.keywords) or len(program.assigned(name)) > 1:
            continue
        for loop in program.nodes:
            if not isinstance(loop, ast.For) or program.looped_over(loop) != name:
                continue
            epochs = [each for each in program.loops(loop) if program.is_over_epochs(each) and each not in program.loops(call)]
            if program.scope(loop) is program.scope(call) and any("backward" in _methods(program, each) for each in epochs):
                yield Hit(
                    call, f"the workers of `{name}` start again in each epoch; `persistent_workers=True` starts them once"
                )
                break


def _methods(program: ParsedProgram, loop: Loop) -> set[str]:
    return {node.attr for node in program.own(loop) if isinstance(node, ast.Attribute)}


def _loaders(program: ParsedProgram) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call that makes a loader with workers, with the name that it gets."""
    for node in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if (
                program.name(call.func) == "torch.utils.data.DataLoader"
            ):
                workers = next((word.value for word in call.keywords if word.arg == "num_workers"), None)
                if isinstance(workers, ast.Constant) and isinstance(workers.value, int) and workers.value > 0:
                    yield call, name


@rule(
    "NBG405",
    "loader-made-each-epoch",
    bad="for epoch in range(n):\n    loader = DataLoader(data, num_workers=4)",
    good="loader = DataLoader(data, num_workers=4, persistent_workers=True)",
)
def loader_made_each_epoch(program: ParsedProgram) -> Iterator[Hit]:
    """An epoch makes a new loader out of the same data, and with it all workers."""
    for call, name in _loaders(program):
        for loop in program.loops(call)[:1]:
            read = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            if program.is_over_epochs(loop) and not read & program.bound(loop) and program.losses(loop):
                yield Hit(
                    call, f"each epoch makes `{name}` and its workers again; make it once, with `persistent_workers=True`"
                )


_CLEANERS = {
    "torch.cuda.empty_cache": "hands the cache back",
    "gc.collect": "goes over all objects",
    "torch.cuda.synchronize": "waits for the device",
}


@rule(
    "NBG406",
    "cleaned-each-step",
    bad="torch.cuda.empty_cache()  # in the loop over batches",
    good="torch.cuda.empty_cache()  # after it",
)
def cleaned_each_step(program: ParsedProgram) -> Iterator[Hit]:
    """Each step of a training empties the allocator's cache, collects garbage, or waits for the device.

    None of this frees memory that a name holds, and after `empty_cache` the next step asks the driver for the memory again.
    """
    for loop in training_loops(program):
        for call in each_step(program, loop):
            if did := _CLEANERS.get(program.name(call.func)):
                yield Hit(call, f"`{ast.unparse(call.func)}()` {did} in each step; call it after the loop, if at all")


_FACTORIES = frozenset(["zeros", "ones", "empty", "full", "arange", "eye", "linspace"])


@rule("NBG407", "made-on-cpu-and-moved", bad="torch.zeros(n).to(device)", good="torch.zeros(n, device=device)")
def made_on_cpu_and_moved(program: ParsedProgram) -> Iterator[Hit]:
    """Each step makes a tensor in host memory and copies it to the device, where it could have been made."""
    for call in program.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="cuda"), args=[], keywords=[]):
                device = '"cuda"'
            case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="to"), args=[where], keywords=[]) if _is_device(
                where
            ):
                device = ast.unparse(where).replace("'", '"')
            case _:
                continue
        given = {word.arg for word in made.keywords}
        factory = program.name(made.func).removeprefix("torch.")
        if (
            factory not in _FACTORIES
            or given & {"device", "out", "requires_grad", "pin_memory", None}
            or any(isinstance(each, ast.Starred) for each in made.args)
        ):
            continue
        scope = program.scope(call)
        runs_often = bool(program.loops(call)) or (isinstance(scope, Function) and scope.name == "forward")
        if runs_often and made.end_lineno == call.end_lineno:
            end = made.end_col_offset or 0
            cut = Edit(call.end_lineno or 0, end, call.end_col_offset or 0, "")
            edits = (*put_behind_arguments(program, made, f", device={device}"), cut) if made.args else ()
            message = f"`torch.{factory}` makes it in host memory and copies it; make it there, with `device={device}`"
            yield Hit(call, message, edits)


def _is_device(node: ast.expr) -> bool:
    """Say whether an argument is a device, as far as its name shows."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith(("cuda", "mps", "xpu"))
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).rpartition(".")[2] in ("device", "dev", "DEVICE")


@rule(
    "NBG408",
    "tensor-of-arrays",
    bad="torch.tensor([np.array(row) for row in rows])",
    good="torch.tensor(np.array([np.array(row) for row in rows]))",
)
def tensor_of_arrays(program: ParsedProgram) -> Iterator[Hit]:
    """`torch.tensor` goes through a list of arrays number by number; out of one array it copies all at once."""
    for call in program.calls:
        if (
            program.name(call.func) not in ("torch.tensor", "torch.FloatTensor", "torch.LongTensor", "torch.as_tensor")
            or not call.args
        ):
            continue
        given = call.args[0]
        element = given.elt if isinstance(given, ast.ListComp) else _appended(program, given)
        if isinstance(element, ast.Call) and _makes_array(program, element):
            numpy = next((alias for alias, name in program.aliases.items() if name == "numpy"), "np")
            yield Hit(
                call,
                f"it is made number by number out of a list of arrays; out of `{numpy}.array(…)` it is one copy",
                put_around(given, f"{numpy}.array(", ")"),
            )


def _appended(program: ParsedProgram, given: ast.expr) -> ast.expr | None:
    """Return the only expression that is appended to a list, where it starts empty."""
    if not isinstance(given, ast.Name) or not all(
        isinstance(value, ast.List) and not value.elts for value in program.assigned(given.id)
    ):
        return None
    values = [
        call.args[0]
        for call in program.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "append"
        and ast.unparse(call.func.value) == given.id
        and call.args
    ]
    return values[0] if len(values) == 1 and program.assigned(given.id) else None


def _makes_array(program: ParsedProgram, call: ast.Call) -> bool:
    return program.name(call.func) in {
        f"numpy.{name}"
        for name in (
            "array",
            "asarray",
            "zeros",
            "ones",
            "stack",
            "concatenate",
            "random.rand",
            "random.randn",
            "full",
            "arange",
            "load",
        )
    }


@rule(
    "NBG409",
    "anomaly-detection-on",
    bad="torch.autograd.set_detect_anomaly(True)",
    good="with torch.autograd.detect_anomaly(): …  # around the pass in question",
)
def anomaly_detection_on(program: ParsedProgram) -> Iterator[Hit]:
    """Anomaly detection is switched on for the whole process and never off.

    Each operation keeps the stack that called it, and each backward pass checks all gradients.
    """
    calls = [call for call in program.calls if program.name(call.func) == "torch.autograd.set_detect_anomaly" and call.args]
    on = [call for call in calls if isinstance(call.args[0], ast.Constant) and call.args[0].value is True]
    if len(on) == len(calls):
        for call in on:
            if isinstance(next(program.around(call)), ast.Expr) and not program.is_conditional(call, program.scope(call)):
                yield Hit(
                    call,
                    "anomaly detection stays on and keeps the stack of each operation; switch it on only to look for a NaN",
                )


@rule(
    "NBG410",
    "saved-each-step",
    bad="torch.save(model.state_dict(), file)  # in the loop over batches",
    good="torch.save(model.state_dict(), file)  # after it",
)
def saved_each_step(program: ParsedProgram) -> Iterator[Hit]:
    """Each step of a training writes a checkpoint. The weights are copied to the host and to the disk."""
    for loop in training_loops(program):
        for call in each_step(program, loop):
            if program.name(call.func) == "torch.save" and any(program.is_over_epochs(each) for each in program.loops(loop)):
                yield Hit(call, "each step writes the weights to the disk; save once per epoch")


@rule(
    "NBG411",
    "validated-each-step",
    bad="for batch in train_loader:\n    …\n    for batch in valid_loader: …",
    good="the loop over valid_loader after the one over train_loader",
)
def validated_each_step(program: ParsedProgram) -> Iterator[Hit]:
    """Each step of a training goes through all of another loader."""
    for loop in training_loops(program):
        for inner in program.own(loop):
            if not isinstance(inner, ast.For) or program.is_conditional(inner, loop) or program.loops(inner)[:1] != [loop]:
                continue
            name = program.looped_over(inner)
            is_other = name and name != program.looped_over(loop) and name.partition(".")[0] not in program.bound(loop)
            is_validation = any(word in name.lower() for word in ("val", "test"))
            leaves = any(isinstance(node, ast.Break) for node in program.own(inner))
            if is_other and is_validation and program.is_over_batches(inner) and not leaves and not program.losses(inner):
                yield Hit(inner, f"each step goes through all of `{name}`; do it once per epoch")
