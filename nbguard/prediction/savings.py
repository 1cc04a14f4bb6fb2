"""What would save memory in a fit, and how much: each change is tried in a trace of its own, by the line that does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import UnpredictableError
from nbguard.prediction.fits.fastai_fit import PRECISIONS, LearnerSource
from nbguard.prediction.fits.step_fit import StepSource
from nbguard.prediction.hardware import Gpu
from nbguard.prediction.prediction import Saving
from nbguard.prediction.trace import FitTrace, FitTracer

_FULL_PRECISION = (8, 0)
"""The architecture from which on GPUs multiply bfloat16 at full speed."""
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    name: str
    cost: str  # what it costs, in words
    code: str = ""  # lines that change the Learner, by the name `learn`, or a step's models and optimizers, by theirs
    parts: int = 1  # into how many batches one is cut
    conf: str = ""  # setting of the allocator


def savings(
    tracer: FitTracer,
    batch_size: int | None,
    endless: FitTrace,
    version: tuple[int, int],
    only: tuple[str, ...] = ("",),
) -> tuple[Saving, ...]:
    """Return the changes that could be tried, with the peaks of the fit after each; the one that saves most comes first.

    Args:
        tracer: traces the fit.
        batch_size: items of a batch; None: the loader's.
        endless: the trace of the fit as it is.
        version: of torch, (major, minor), by which settings of the allocator are read.
        only: beginnings of the names of changes to try.
    """
    size, tried = endless.sizes[0], list[Saving]()
    for change in _changes(tracer, size, endless):
        if not change.name.startswith(only):
            continue
        own = replace(tracer, code="\n".join(filter(None, (tracer.code, change.code))), is_last_optional=True)
        if change.conf:
            own = replace(own, settings=AllocatorSettings.parse(_joined(tracer.settings.conf(), change.conf), version))
        try:
            trace = own.endless(batch_size if change.parts == 1 else size // change.parts)
        except UnpredictableError:
            continue  # this model cannot be changed so
        tried.append(
            Saving(
                name=change.name,
                peak_allocated=trace.peak_allocated,
                peak_reserved=trace.peak_reserved,
                saved=endless.peak_reserved - trace.peak_reserved,
                batch_size=size // change.parts,
                code=change.code,
                settings=change.conf,
                cost=change.cost,
            )
        )
    return tuple(sorted(tried, key=lambda saving: -saving.saved))


def _changes(tracer: FitTracer, size: int, endless: FitTrace) -> Iterator[_Change]:
    """Yield the changes that this fit leaves room for."""
    source = tracer.source
    if isinstance(source, LearnerSource):
        yield from _of_learner(source.learn, source.precision, tracer.gpu, size)
    if isinstance(source, StepSource):
        yield from _of_step(source, endless)
    for name, model in source.modules:
        blocks = _repeated(model)
        if blocks is not None:
            kind, count = blocks
            path = "learn.model" if isinstance(source, LearnerSource) else name
            yield _Change(
                name=f"checkpoints of {count} {kind}",
                code="from functools import partial\n"
                "from torch.utils.checkpoint import checkpoint\n"
                f'for block in [each for each in {path}.modules() if type(each).__name__ == "{kind}"]:\n'
                "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
                cost="about a third slower: these blocks compute twice",
            )
            break
    if isinstance(source, LearnerSource) and endless.convolutions and not _has_callback(source.learn, "ChannelsLast"):
        yield _Change(
            name="channels last",
            code="from fastai.callback.channelslast import ChannelsLast\nlearn.add_cb(ChannelsLast())",
            cost="faster in half precision on GPUs with tensor cores",
        )
    if "expandable_segments" not in tracer.settings.conf():
        yield _Change(name="expandable segments", conf=_EXPANDABLE, cost="nothing; it is set before PyTorch is imported")


def _of_learner(learn: Any, precision: str, gpu: Gpu, size: int) -> Iterator[_Change]:
    """Yield the changes to a Learner's precision, batches and optimizer."""
    if not precision and not _has_callback(learn, "MixedPrecision"):
        if gpu.architecture >= _FULL_PRECISION:
            yield _Change(name="bfloat16", code=PRECISIONS["bf16"], cost="faster; sums keep fewer digits")
        yield _Change(
            name="float16",
            code=PRECISIONS["fp16"],
            cost="faster; gradients are scaled, and a step is skipped now and then",
        )
    if not _has_callback(learn, "GradientAccumulation"):
        has_norm = any("BatchNorm" in type(each).__name__ for each in learn.model.modules())
        norm = "; batch norm sees fewer items" if has_norm else ""
        for parts in (2, 4):
            if size % parts == 0:
                yield _Change(
                    name=f"gradients of {parts} batches of {size // parts} added up",
                    code="from fastai.callback.training import GradientAccumulation\n"
                    f"learn.add_cb(GradientAccumulation(n_acc={size}))",
                    parts=parts,
                    cost=f"a little slower{norm}; make the DataLoaders with bs={size // parts}",
                )
    if _optimizer(learn) != "SGD":
        yield _Change(
            name="SGD with momentum",
            code="from functools import partial\n"
            "from fastai.optimizer import SGD\n"
            "learn.opt_func = partial(SGD, mom=0.9)\n"
            "learn.create_opt()",
            cost="another optimizer: it wants another learning rate",
        )


def _of_step(source: StepSource, endless: FitTrace) -> Iterator[_Change]:
    """Yield the changes to the models and optimizers of a step that need no other line of it."""
    name = next((name for name, _ in source.modules), "")
    if name.isidentifier() and endless.convolutions:
        yield _Change(
            name="channels last",
            code=f"import torch\n{name}.to(memory_format=torch.channels_last)",
            cost="faster in half precision on GPUs with tensor cores",
        )
    for name, optimizer in source.optimizers:
        groups = optimizer.param_groups
        if name.isidentifier() and groups and all(group.get("foreach", True) is None for group in groups):
            yield _Change(
                name="a step of one parameter after the other",
                code=f'for group in {name}.param_groups:\n    group["foreach"] = False',
                cost="slower where a model has many small parameters",
            )


def _has_callback(learn: Any, name: str) -> bool:
    return any(type(callback).__name__ == name for callback in learn.cbs)


def _optimizer(learn: Any) -> str:
    """Return the name of the optimizer that the Learner will make."""
    function = learn.opt_func
    while type(function) is partial:
        function = function.keywords.get("opt") or function.func
    return str(getattr(function, "__name__", ""))


def _joined(settings: str, more: str) -> str:
    return f"{settings},{more}" if settings else more


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
