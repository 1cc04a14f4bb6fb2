"""Changes that would save memory in a fit, a step or a loop, each tried in a trace of its own, by the line that does it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any

from torch import nn, optim

from nbguard.errors import UnpredictableError
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.scan.devices.segments import can_expand
from nbguard.training.prediction.fits.functions import names_used
from nbguard.training.prediction.fits.learner_fit import PRECISIONS, LearnerSource
from nbguard.training.prediction.fits.loop_fit import LoopSource
from nbguard.training.prediction.fits.step_fit import StepSource
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.prediction import ChangeKind, LargestBatch, Saving
from nbguard.training.prediction.trace import FailedFitError, FitTrace, FitTracer, OutOfTimeError

# --- The largest batch that a fit runs with on a GPU, found by traces of it with the GPU's capacity in the model


_GROWTH = 8
"""Factor of the batch's growth from one trace to the next until a peak exceeds the GPU."""
_FRAGMENTED = 0.97
"""Share of the GPU that tensors can fill; the rest is free between them."""
_STEP = 0.04
"""Share of the estimate that is the search's next step: predicted peaks grow by steps, and nearly in a line."""


def largest_batch(tracer: FitTracer, endless: FitTrace) -> LargestBatch:
    """Return the largest batches that the fit runs with, and is sure to run with, on the tracer's GPU.

    Each answer is verified by a trace of its own, and so is the next larger batch.

    Args:
        tracer: traces the fit; its GPU has a capacity.
        endless: the trace of one batch size without a limit, to begin with.
    """
    tracer = replace(tracer, is_last_optional=True)
    size, most = endless.sizes[0], endless.items
    tried: dict[int, bool] = {}

    def runs(items: int) -> bool:
        try:
            tried[items] = tracer.runs(items, 0)
        except FailedFitError:  # of so few items, as batch norm refuses one
            tried[items] = False
        return tried[items]

    def is_sure(items: int) -> bool:
        try:
            return tracer.answer(items, tracer.endless(items))[0] is True
        except FailedFitError:
            return False

    limit = _search(runs, _estimate(tracer, endless, size, most), most)
    if endless.unknown:
        return LargestBatch(sure=None, limit=limit, is_whole_set=limit == most, traces=len(tried))
    sure = limit if not limit or is_sure(limit) else _search(is_sure, int(limit * 0.94), limit - 1)
    return LargestBatch(sure=sure, limit=limit, is_whole_set=limit == most, traces=len(tried))


def _estimate(tracer: FitTracer, endless: FitTrace, size: int, most: int) -> int:
    """Return the size at which the allocated peak fills the GPU, by a line between two traces without a limit around it.

    Small batches change no peak: the optimizer's step or a workspace makes it. So sizes grow until the room is exceeded.
    """
    room = (tracer.gpu.capacity or 0) - tracer.gpu.context
    low, filled = (1, endless.model) if endless.peak_allocated > room else (size, endless.peak_allocated)
    high = size if low < size else min(size * _GROWTH, most)
    while high > low:
        peak = endless.peak_allocated if high == size else tracer.endless(high).peak_allocated
        per_item = (peak - filled) / (high - low)
        line = int(_FRAGMENTED * (low + (room - filled) / per_item)) if per_item > 0 else most
        if peak > room or high == most:
            return max(1, min(line, high))
        low, filled, high = high, peak, min(most, high * _GROWTH, max(high + 1, 2 * line))
    return low


def _search(holds: Callable[[int], bool], estimate: int, most: int) -> int:
    """Return the largest number up to `most` that holds, 0 if none does: outwards from the estimate, then by halves."""
    low, high, step = 0, most + 1, max(1, int(_STEP * estimate))
    is_low_tried = is_high_tried = False
    while high - low > 1:
        if is_low_tried and is_high_tried:
            at = (low + high) // 2
        elif is_low_tried or is_high_tried:
            at = min(low + step, high - 1) if is_low_tried else max(high - step, low + 1)
            step *= 2
        else:
            at = min(max(estimate, low + 1), high - 1)
        if holds(at):
            low, is_low_tried = at, True
        else:
            high, is_high_tried = at, True
    return low


# --- Changes to a model (checkpoints, biases that a norm takes away, a loss in parts) and to a fastai Learner.


# --- A change to a fit that may save memory.


_PIECES = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that can be tried."""

    name: str
    cost: str  # its cost, in words
    code: str = ""  # lines that change the Learner, by the name `learn`, or a step's models and optimizers, by theirs
    parts: int = 1  # into how many batches one is cut
    conf: str = ""  # setting of the allocator
    kind: ChangeKind = ""  # of a change that others ask for


def added_up(
    size: int, models: Iterable[nn.Module], code: Callable[[int], str], more: Callable[[int], str]
) -> Iterator[Change]:
    """Yield the changes to batches of a half and a quarter of the items whose gradients are added up.

    Args:
        size: items of a batch as it is.
        models: the user's, which are read.
        code: lines that let the optimizer wait, by the number of parts of a batch.
        more: further lines, likewise.
    """
    has_norm = any("BatchNorm" in type(each).__name__ for model in models for each in model.modules())
    norm = "; batch norm sees fewer items" if has_norm else ""
    for parts in _PIECES:
        if size % parts == 0:
            yield Change(
                name=f"gradients of {parts} batches of {size // parts} added up",
                code=code(parts),
                parts=parts,
                kind="accumulation",
                cost=f"a little slower{norm}; {more(parts)}",
            )


_BIASED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PARTS = 8


def of_model(path: str, model: Any, after: str = "") -> Iterator[Change]:
    """Yield the changes to a model.

    Args:
        path: expression that leads to the model.
        model: the user's, which is read.
        after: a line to run after parameters are gone.
    """
    if blocks := _repeated(model):
        kind, count = blocks
        yield Change(
            name=f"checkpoints of {count} {kind}",
            code="from functools import partial\n"
            "from torch.utils.checkpoint import checkpoint\n"
            f'for block in [each for each in {path}.modules() if type(each).__name__ == "{kind}"]:\n'
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
            cost="about a third slower, because these blocks compute twice",
            kind="checkpoints",
        )
    if kinds := ", ".join(sorted({f"nn.{type(layer).__name__}" for layer in _before_norms(model)})):
        yield Change(
            name="no bias before a batch norm",
            code="from torch import nn\n"
            f"for block in [each for each in {path}.modules() if isinstance(each, nn.Sequential)]:\n"
            "    for layer, norm in zip(block, list(block)[1:]):\n"
            f"        if type(layer) in ({kinds},) and layer.bias is not None and hasattr(norm, 'running_mean'):\n"
            "            norm.running_mean -= layer.bias.detach()\n"
            f"            layer.bias = None{after}",
            cost="nothing; the norm removes the bias anyway",
        )


def loss_in_parts(path: str, loss: Any) -> Iterator[Change]:
    """Yield the change of a cross entropy to one that is computed in parts, if the mean of parts is the whole's.

    Args:
        path: expression that leads to the loss, a module of PyTorch's.
        loss: the user's, which is read.
    """
    if type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean" and loss.weight is None:
        yield Change(
            name=f"the loss in {_PARTS} parts",
            code="from torch.utils.checkpoint import checkpoint\n"
            f"whole_loss = {path}.forward\n"
            "def loss_in_parts(out, target):\n"
            f"    parts = zip(out.chunk({_PARTS}), target.chunk({_PARTS}))\n"
            "    return sum(checkpoint(whole_loss, *part, use_reentrant=False) * len(part[0]) for part in parts) / len(out)\n"
            f"{path}.forward = loss_in_parts",
            cost="a little slower, because the loss computes twice; correct if no target is ignored",
        )


def _before_norms(model: Any) -> Iterator[Any]:
    """Yield the layers with a bias that stand before a batch norm in a sequence."""
    for block in model.modules():
        if isinstance(block, nn.Sequential):
            for layer, norm in zip(block, list(block)[1:], strict=False):
                if type(layer) in _BIASED and layer.bias is not None and getattr(norm, "running_mean", None) is not None:
                    yield layer


def _repeated(model: Any) -> tuple[str, int] | None:
    """Return the class of the modules that make up most of a model in equal blocks, and their number."""
    counts, sizes = Counter[str](), Counter[str]()
    for module in model.modules():
        name = type(module).__name__
        if next(module.children(), None) is None or type(module).__module__ == "torch.nn.modules.container":
            continue
        counts[name] += 1
        sizes[name] += sum(parameter.numel() for parameter in module.parameters())
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return None
    best = max(repeated, key=lambda name: (sizes[name], -counts[name]))
    return best, counts[best]


# --- Changes to a fastai Learner, on precision, batches, optimizer, gradients, loss, memory format.


FULL_PRECISION = (8, 0)
"""The first architecture whose GPUs multiply bfloat16 at full speed."""
_FUSABLE_OF_FASTAI = ("Adam", "AdamW")


def of_learner(source: LearnerSource, gpu: Gpu, size: int, *, convolves: bool) -> Iterator[Change]:
    """Yield the changes that a Learner leaves room for.

    Args:
        source: with the user's Learner, which is read.
        gpu: decides about the precision.
        size: items of a batch.
        convolves: the model has convolutions.
    """
    learn = source.learn
    if not source.precision and not _has_callback(learn, "MixedPrecision"):
        if gpu.architecture >= FULL_PRECISION:
            yield Change(kind="precision", name="bfloat16", code=PRECISIONS["bf16"], cost="faster; sums keep fewer digits")
        yield Change(
            kind="precision",
            name="float16",
            code=PRECISIONS["fp16"],
            cost="faster; gradients are scaled, and an occasional step is skipped",
        )
    if not _has_callback(learn, "GradientAccumulation"):
        code = f"from fastai.callback.training import GradientAccumulation\nlearn.add_cb(GradientAccumulation(n_acc={size}))"
        yield from added_up(size, [learn.model], lambda _: code, lambda parts: f"make the DataLoaders with bs={size // parts}")
    if _can_freeze(learn):
        yield Change(
            kind="frozen",
            name="only the head trained",
            code="learn.freeze()",
            cost="the body keeps its weights, as in transfer learning; learn.unfreeze() lets it learn again",
        )
    yield from _of_learner_optimizer(learn)
    yield from loss_in_parts("learn.loss_func.func", getattr(learn.loss_func, "func", None))
    if convolves and not _has_callback(learn, "ChannelsLast"):
        yield Change(
            name="channels last",
            code="from fastai.callback.channelslast import ChannelsLast\nlearn.add_cb(ChannelsLast())",
            cost="faster in half precision on GPUs with tensor cores",
        )


def _of_learner_optimizer(learn: Any) -> Iterator[Change]:
    optimizer, is_torchs = _optimizer(learn)
    if optimizer != "SGD":
        yield Change(
            name="SGD with momentum",
            code="from functools import partial\n"
            "from fastai.optimizer import SGD\n"
            "learn.opt_func = partial(SGD, mom=0.9)\n"
            "learn.create_opt()",
            cost="it is another optimizer and needs another learning rate",
        )
    if is_torchs and optimizer in _FUSABLE_OF_FASTAI and not _is_fused(learn):
        yield Change(
            name=f"a fused {optimizer}",
            code="from functools import partial\n"
            "import torch\n"
            "from fastai.optimizer import OptimWrapper\n"
            f"learn.opt_func = partial(OptimWrapper, opt=partial(torch.optim.{optimizer}, fused=True))\n"
            "learn.opt = None",
            cost="nothing; its step is one kernel, and faster",
        )
    if not is_torchs and getattr(learn.opt_func, "__name__", "") != "letting_gradients_go":
        yield Change(
            name="gradients freed after the step",
            code="make_opt = learn.opt_func\n"
            "def letting_gradients_go(*args, **kwargs):\n"
            "    opt = make_opt(*args, **kwargs)\n"
            '    opt.zero_grad = lambda: [setattr(parameter, "grad", None) for parameter, *_ in opt.all_params()]\n'
            "    return opt\n"
            "learn.opt_func = letting_gradients_go\n"
            "learn.opt = None",
            cost="nothing; the backward pass makes them again",
        )


def _can_freeze(learn: Any) -> bool:
    """Say whether a Learner trains several groups of parameters, such as a body and a head, and `freeze` leaves one."""
    if learn.opt is None or getattr(learn.opt, "frozen_idx", None):
        return False
    groups: Any = getattr(learn.opt, "param_lists", ())
    return len(groups) > 1


def _has_callback(learn: Any, name: str) -> bool:
    return any(type(callback).__name__ == name for callback in learn.cbs)


def _optimizer(learn: Any) -> tuple[str, bool]:
    """Return the name of the optimizer that the Learner will make, and whether it is PyTorch's."""
    function, is_torchs = learn.opt_func, False
    while type(function) is partial:
        is_torchs |= function.func is getattr(sys.modules.get("fastai.optimizer"), "OptimWrapper", None)
        function = function.keywords.get("opt") or function.func
    return str(getattr(function, "__name__", "")), is_torchs


def _is_fused(learn: Any) -> bool:
    inner = learn.opt_func.keywords.get("opt") if type(learn.opt_func) is partial else None
    return type(inner) is partial and bool(inner.keywords.get("fused"))


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
    if "expandable_segments" not in tracer.settings.conf() and can_expand():
        yield Change(name="expandable segments", conf=_EXPANDABLE, cost="nothing; it is set before PyTorch is imported")


def _joined(settings: str, more: str) -> str:
    return f"{settings},{more}" if settings else more
