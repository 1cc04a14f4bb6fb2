"""Changes that would save memory in a fit, a step or a loop, each tried in a trace of its own, by the line that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

from torch import optim

from nbguard.errors import UnpredictableError
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.training.prediction.fits.functions import names_used
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.fits.loop_fit import LoopSource
from nbguard.training.prediction.fits.step_fit import StepSource
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.prediction import Saving
from nbguard.training.prediction.savings.of_model import FULL_PRECISION, Change, added_up, loss_in_parts, of_learner, of_model
from nbguard.training.prediction.trace import FitTrace, FitTracer, OutOfTimeError, largest_batch

# --- Changes to the models and optimizers of a step or a loop that need no other line of it.


_FUSED = (optim.Adam, optim.AdamW, optim.SGD)


def of_step(source: StepSource | LoopSource, gpu: Gpu, size: int, *, convolves: bool) -> Iterator[Change]:
    """Yield the changes that a step leaves room for.

    Args:
        source: with the user's step, which is read.
        gpu: decides about the precision.
        size: items of a batch; 0 if unknown.
        convolves: a model has convolutions.
    """
    function = source.step if isinstance(source, StepSource) else source.loop
    code: CodeType | None = getattr(function, "__code__", None)
    used = set() if code is None else set(names_used(code))
    models = [(name, model) for name, model in source.modules if name.isidentifier() and _has_parameters(model)]
    optimizers = [(name, optimizer) for name, optimizer in source.optimizers if name.isidentifier()]
    if models and "autocast" not in used:
        yield _in_half(models[0][0], gpu)
    if len(optimizers) == 1 and size:
        yield from added_up(
            size,
            [model for _, model in models],
            partial(_waiting, optimizers[0][0]),
            lambda parts: f"give batches of {size // parts} and divide the loss by {parts}",
        )
    for name, optimizer in optimizers:
        yield from _of_optimizer(name, optimizer, getattr(function, "__globals__", {}))
        if code is not None and _says(code, "set_to_none"):
            yield Change(
                name="gradients freed after the step",
                code=f"{name}.zero_grad = lambda *_, **__: type({name}).zero_grad({name})",
                cost="nothing; the backward pass makes them again",
            )
    for name, module in source.modules:
        if name.isidentifier():
            yield from loss_in_parts(name, module)
    if models and convolves:
        yield Change(
            name="channels last",
            code=f"import torch\n{models[0][0]}.to(memory_format=torch.channels_last)",
            cost="faster in half precision on GPUs with tensor cores",
        )


def _has_parameters(model: Any) -> bool:
    return next(model.parameters(), None) is not None


def _in_half(model: str, gpu: Gpu) -> Change:
    dtype, cost = "bfloat16", "faster; sums keep fewer digits, also in the loss unless it takes out.float()"
    if gpu.architecture < FULL_PRECISION:
        dtype, cost = "float16", "faster; needs torch.amp.GradScaler around loss and step, or small gradients are lost"
    code = (
        f"import torch\nwhole_forward = {model}.forward\n"
        "def in_half(*args, **kwargs):\n"
        f'    with torch.autocast("cuda", torch.{dtype}):\n'
        "        return whole_forward(*args, **kwargs)\n"
        f"{model}.forward = in_half"
    )
    return Change(name=dtype, code=code, cost=cost)


def _waiting(optimizer: str, parts: int) -> str:
    """Return the lines that let an optimizer step once in so many batches."""
    return (
        "from itertools import count\n"
        f"turns, take_step, clear = count(1), {optimizer}.step, {optimizer}.zero_grad\n"
        "def step_at_last(*args, **kwargs):\n"
        f"    if next(turns) % {parts} == 0:\n"
        "        take_step(*args, **kwargs)\n"
        "        clear()\n"
        f"{optimizer}.step, {optimizer}.zero_grad = step_at_last, lambda *_, **__: None"
    )


def _of_optimizer(name: str, optimizer: Any, namespace: Mapping[str, Any]) -> Iterator[Change]:
    groups = optimizer.param_groups
    if type(optimizer) is not optim.SGD and namespace.get(name) is optimizer:
        yield Change(
            name="SGD with momentum",
            code="import torch\n"
            f'parameters = [each for group in {name}.param_groups for each in group["params"]]\n'
            f"{name} = torch.optim.SGD(parameters, lr={name}.param_groups[0]['lr'], momentum=0.9)",
            cost="it is another optimizer and needs another learning rate",
        )
    is_plain = bool(groups) and all(group.get("foreach", True) is None and not group.get("fused") for group in groups)
    if is_plain and type(optimizer) in _FUSED and not optimizer.state:
        yield Change(
            name=f"a fused {type(optimizer).__name__}",
            code=f'for group in {name}.param_groups:\n    group["fused"] = True',
            cost="nothing; its step is one kernel, and faster",
        )
    elif is_plain:
        yield Change(
            name="a step that updates one parameter at a time",
            code=f'for group in {name}.param_groups:\n    group["foreach"] = False',
            cost="slower if the model has many small parameters",
        )


def _says(code: CodeType, word: str) -> bool:
    """Say whether an argument of that name is given somewhere in a function."""
    consts = code.co_consts
    return any(isinstance(each, tuple) and word in each for each in consts) or any(
        _says(each, word) for each in consts if isinstance(each, CodeType)
    )


_EXPANDABLE = "expandable_segments:True"


def savings(
    tracer: FitTracer,
    batch_size: int | None,
    endless: FitTrace,
    version: tuple[int, int],
    is_wanted: Callable[[Change], bool] = lambda _: True,
    *,
    largest: bool = False,
) -> tuple[Saving, ...]:
    """Return the changes that could be tried, with the peaks of the fit after each; the one that saves most comes first.

    Args:
        tracer: traces the fit.
        batch_size: items of a batch; the loader's if None.
        endless: the trace of the fit as it is.
        version: of torch, (major, minor), whose settings of the allocator are read.
        is_wanted: says whether to try a change.
        largest: also search for the largest batch after each.
    """
    size, tried = endless.sizes[0], list[Saving]()
    for change in _changes(tracer, size, endless):
        if not is_wanted(change):
            continue
        own = replace(tracer, code="\n".join(filter(None, (tracer.code, change.code))), is_last_optional=True)
        if change.conf:
            own = replace(own, settings=AllocatorSettings.parse(_joined(tracer.settings.conf(), change.conf), version))
        after = batch_size if change.parts == 1 else size // change.parts
        try:
            trace = own.endless(after)
            fits = own.answer(after, trace)[0]
        except OutOfTimeError:
            break
        except UnpredictableError:
            continue  # this model cannot be changed so
        tried.append(
            Saving(
                name=change.name,
                kind=change.kind,
                peak_allocated=trace.peak_allocated,
                peak_reserved=trace.peak_reserved,
                saved=endless.peak_reserved - trace.peak_reserved,
                batch_size=size // change.parts,
                code=change.code,
                settings=change.conf,
                cost=change.cost,
                fits=fits,
                largest=largest_batch(own, trace) if largest else None,
            )
        )
    return tuple(sorted(tried, key=lambda saving: -saving.saved))


def _changes(tracer: FitTracer, size: int, endless: FitTrace) -> Iterator[Change]:
    """Yield the changes that this fit leaves room for."""
    source, convolves = tracer.source, bool(endless.convolutions)
    if isinstance(source, LearnerSource):
        yield from of_learner(source, tracer.gpu, size, convolves=convolves)
        yield from of_model("learn.model", source.learn.model, after="\nlearn.opt = None")
    elif isinstance(source, (StepSource, LoopSource)):
        yield from of_step(source, tracer.gpu, size, convolves=convolves)
    if not isinstance(source, LearnerSource):
        for name, model in source.modules:
            yield from of_model(name, model)
    if "expandable_segments" not in tracer.settings.conf():
        yield Change(name="expandable segments", conf=_EXPANDABLE, cost="nothing; it is set before PyTorch is imported")


def _joined(settings: str, more: str) -> str:
    return f"{settings},{more}" if settings else more
