"""Changes that would save memory or time, only where the fit gives a reason, and never with a guessed figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.libraries import in_own_words, setting
from nbguard.training.profiler.analysis.report import MemoryReport, Remedy
from nbguard.training.profiler.checks.amp import AmpFacts
from nbguard.training.profiler.checks.optimizer_facts import OptimizersFacts
from nbguard.training.profiler.checks.switches import SwitchFacts
from nbguard.units import MiB, format_bytes

_TIGHT = 0.8
"""Of a device's memory: from such a peak on, memory is worth saving."""
_NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyContext:
    """The observations that speak for one remedy or another. Bytes are None where they were not counted."""

    has_device: bool  # CUDA was in use
    peak: int | None = None  # bytes of memory
    capacity: int | None = None  # bytes of the device
    gradients: int = 0  # bytes of gradients that are cleared in place
    activations: int | None = None  # bytes at the peak
    clears_in_place: bool = False  # gradients are filled with zeros and stay
    is_own: bool = False  # by an optimizer of the library's own
    is_learners: bool = False  # a fit of a Learner
    dtype: str = "float32"  # of the training batches' forward passes
    batch_size: int | None = None  # of the first input of the first training batch
    convolves: bool = False  # the model has two-dimensional convolutions
    is_channels_last: bool = False  # and their weights are laid out so

    @property
    def is_tight(self) -> bool:
        """Say whether memory is short."""
        return self.peak is not None and self.capacity is not None and self.peak >= _TIGHT * self.capacity


def remedy_context(
    optimizers: OptimizersFacts,
    amp: AmpFacts,
    switches: SwitchFacts,
    memory: MemoryReport | None = None,
    *,
    is_learners: bool = False,
) -> RemedyContext:
    """Return the observations of several instruments together."""
    in_place = [optimizer for optimizer in optimizers.optimizers if optimizer.is_learners or optimizer.cleared_in_place]
    categories = {} if memory is None else {category.name: category.nbytes for category in memory.categories}
    dtypes = [dtype for dtype in ("float16", "bfloat16") if amp.in_dtype(dtype)]
    return RemedyContext(
        has_device=switches.has_device,
        peak=None if memory is None else memory.peak,
        capacity=None if memory is None else memory.capacity,
        gradients=sum(optimizer.gradient_bytes for optimizer in in_place),
        activations=categories.get("activations"),
        clears_in_place=bool(in_place),
        is_own=any(optimizer.is_learners for optimizer in in_place),
        is_learners=is_learners,
        dtype=dtypes[0] if dtypes else "float32",
        batch_size=switches.batch_size,
        convolves=switches.convolves,
        is_channels_last=switches.is_channels_last,
    )


def remedies(facts: RemedyContext) -> tuple[Remedy, ...]:
    """Return the remedies that fit a fit, measured ones first."""
    if not facts.has_device and not facts.is_tight:
        return ()
    fitting = [*_set_to_none(facts), *_precision(facts), *_layout(facts)]
    if facts.is_tight:
        fitting += [*_batch(facts), *_checkpointing(facts)]
    return tuple(sorted(fitting, key=lambda remedy: not remedy.measured))


def _set_to_none(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.clears_in_place and facts.gradients >= MiB:
        held = format_bytes(facts.gradients)
        yield Remedy(
            name="set_to_none",
            effect=f"{held} of gradients are free during the forward pass; the peak falls by at most that",
            measured=True,
            change=setting("clear gradients") if facts.is_own else "`optimizer.zero_grad(set_to_none=True)`",
            nbytes=facts.gradients,
        )


def _precision(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.has_device and facts.dtype == "float32":
        half = "" if facts.activations is None else f", up to half of the {format_bytes(facts.activations)} of activations"
        of_loop = "`torch.autocast('cuda', dtype=torch.bfloat16)` around model and loss"
        yield Remedy(
            name="mixed precision",
            effect=f"less memory{half}, and less time on tensor cores: {_NOT_MEASURED}",
            measured=False,
            change="`learn.to_fp16()`" if facts.is_learners else of_loop,
        )


def _layout(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.has_device and facts.convolves and not facts.is_channels_last and facts.dtype != "float32":
        change = "`model.to(memory_format=torch.channels_last)`, and the same for the inputs"
        yield Remedy(
            name="channels_last", effect=f"faster convolutions in {facts.dtype}: {_NOT_MEASURED}", measured=False, change=change
        )


def _batch(facts: RemedyContext) -> Iterator[Remedy]:
    size, activations = facts.batch_size, facts.activations
    if size is None or size < 2:
        return
    less = "less memory" if activations is None else f"about half of the {format_bytes(activations)} of activations"
    change = f"`bs={size // 2}`; with two batches per step{in_own_words('accumulate', size=size)} the step sees as much"
    yield Remedy(
        name="smaller batch, gradient accumulation",
        kind="smaller batch",
        effect=f"{less}, and more steps: {_NOT_MEASURED}",
        measured=False,
        change=change,
    )


def _checkpointing(facts: RemedyContext) -> Iterator[Remedy]:
    held = "" if facts.activations is None else f" of {format_bytes(facts.activations)}"
    change = "`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` around the largest blocks"
    yield Remedy(
        name="checkpointing",
        kind="checkpointing",
        effect=f"most of the activations{held} for a second forward pass: {_NOT_MEASURED}",
        measured=False,
        change=change,
    )
