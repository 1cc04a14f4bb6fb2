"""Growth and waits of a case, as counts: never as times."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing.process
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Names = dict[str, Any]
Measure = Callable[[str, Names], int]
"""Runs the source of a case in a namespace, and returns a count that is larger the worse it is."""


def after(count: Callable[[Names], int]) -> Measure:
    """Measure the namespace that a case leaves."""

    def measure(source: str, names: Names) -> int:
        run(source, names)
        return count(names)

    return measure


def run(source: str, names: Names) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, "<case>", "exec"), names)
    gc.collect()


def nodes(names: Names) -> int:
    """Count the nodes of autograd's graphs that the values of a namespace lead to."""
    waiting, seen, graph = [*names.values()], set[int](), set[Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, types.ModuleType | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            waiting.append(value.grad_fn)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "next_functions"):
            graph.add(value)
            waiting += [function for function, _ in value.next_functions]
        elif hasattr(value, "losses") or hasattr(value, "total"):
            waiting += vars(value).values()
    return len(graph)


def living_weights() -> int:
    """Count the weights of the layers that cases make and give up, 7 × 5 each."""
    gc.collect()
    return sum(type(each) is torch.nn.Parameter and each.shape == (5, 7) for each in gc.get_objects())


def weights(source: str, names: Names) -> int:
    """Count the weights that a case gives up, and that live on."""
    before = living_weights()
    run(source, names)
    return living_weights() - before


def saved(source: str, names: Names) -> int:
    """Count the tensors that graphs save for a backward pass while a case runs."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(source, names)
    return count


def saved_at_end(source: str, names: Names) -> int:
    """Count the saved tensors that are alive when a case is over."""

    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            alive.add(self)

    alive: weakref.WeakSet[Box] = weakref.WeakSet()
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        run(source, names)
    return len(alive)


def calls(owner: Any, name: str) -> Measure:
    """Count the calls of a function while a case runs."""

    def measure(source: str, names: Names) -> int:
        made, count = getattr(owner, name), 0

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return made(*arguments, **options)

        with patched(owner, name, counted):
            run(source, names)
        return count

    return measure


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def workers(source: str, names: Names) -> int:
    """Count the processes that a case starts."""
    measured = calls(multiprocessing.process.BaseProcess, "start")(source, names)
    names.clear()
    gc.collect()
    return measured


def copies_to_devices(source: str, names: Names) -> int:
    """Count the copies of tensors from device to device."""
    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            count += function is torch.ops.aten._to_copy.default
            return function(*args, **(kwargs or {}))

    with Counter():
        run(source, names)
    return count


def slow_lists(source: str, names: Names) -> int:
    """Count PyTorch's own warnings about lists of arrays."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(source, names)
    finally:
        torch.set_warn_always(before)
    return sum("extremely slow" in str(each.message) for each in caught)


def anomaly(source: str, names: Names) -> int:
    """Say whether anomaly detection is on when a case is over."""
    try:
        run(source, names)
        return int(torch.is_anomaly_enabled())
    finally:
        torch.autograd.set_detect_anomaly(False)


def dropout_off(source: str, names: Names) -> int:
    """Count the passes with gradients in which dropout is off."""
    count = 0

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        count += type(module) is torch.nn.Dropout and torch.is_grad_enabled() and not module.training

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        run(source, names)
    finally:
        handle.remove()
    return count


def passes(source: str, names: Names) -> int:
    """Count the calls of models."""
    count = 0

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        count += type(module) is torch.nn.Sequential

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        run(source, names)
    finally:
        handle.remove()
    return count


def loaded_on_device(source: str, names: Names) -> int:
    """Count the bytes that a case keeps of a checkpoint that it asked for on the device; it is loaded into host memory here."""
    load = torch.load
    alive: list[weakref.ref[torch.Tensor]] = []

    def loaded(file: Any, map_location: str) -> Any:
        content = load(file)
        if map_location == "cuda":
            alive.extend(weakref.ref(each) for each in content.values())
        return content

    with patched(torch, "load", loaded):
        run(source, names)
    return sum(tensor.nbytes for each in alive if (tensor := each()) is not None)


def figures(source: str, names: Names) -> int:
    """Count the open figures."""
    import matplotlib.pyplot as plt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(source, names)
    count = len(plt.get_fignums())
    plt.close("all")
    return count


def outside_optimizer(model: str, optimizer: str) -> Measure:
    """Count the parameters of a model that an optimizer does not have."""

    def count(names: Names) -> int:
        known = {id(each) for group in names[optimizer].param_groups for each in group["params"]}
        return sum(id(each) not in known for each in names[model].parameters())

    return after(count)


def gradient(names: Names) -> int:
    """Return the sum of the gradients' sizes, in thousandths."""
    return sum(int(1000 * each.grad.abs().sum()) for each in names["model"].parameters())


def shared_weights(names: Names) -> int:
    """Count the kept weights that are the model's own."""
    return sum(names["shared"][name] == value.data_ptr() for name, value in names["model"].state_dict().items())


def steps_lost(names: Names) -> int:
    """Return how many steps an optimizer does not remember."""
    return 6 - max(int(state["step"]) for state in names["optimizer"].state.values())


def hooks_of_rerun(source: str, names: Names) -> int:
    """Count the hooks after the last cell has run three times."""
    *first, last = cells(source)
    for cell in (*first, last, last, last):
        run(cell, names)
    return len(names["model"][0]._forward_hooks)


def weights_in_out(source: str, names: Names) -> int:
    """Count the weights that live on in IPython's own shell after its cells have run."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    before = living_weights()
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in (*cells(source), "0", "0", "0", "0"):
            shell.run_cell(cell, store_history=True).raise_error()
    counted = living_weights() - before
    shell.reset(new_session=True, aggressive=False)
    return counted


def cells(source: str) -> list[str]:
    """Return the cells of a case: the text between lines of `# %%`."""
    return [cell.strip("\n") for cell in source.split("# %%\n") if cell.strip()]


def cases(folder: Path) -> list[str]:
    """Return the names of all cases."""
    return sorted(file.stem.removesuffix("_bad") for file in folder.glob("*_bad.py"))
