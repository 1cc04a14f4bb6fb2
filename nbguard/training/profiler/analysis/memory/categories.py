"""The memory of a fit at its peak by category, from counters and from sizes of tensors. Categories add up to the peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbguard.training.profiler.analysis.report import Category
from nbguard.training.profiler.analysis.time import phases

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
STATE = "optimizer state"
INPUTS = "inputs"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
BEFORE = "before the fit"
OTHER = "other"
ORDER = (PARAMETERS, BUFFERS, GRADIENTS, STATE, INPUTS, ACTIVATIONS, TEMPORARIES, BEFORE, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Sizes of the tensors that stay from batch to batch, in bytes; each storage is counted once."""

    parameters: int = 0  # of the modules that were called
    buffers: int = 0  # of the same modules
    gradients: int = 0  # before an optimizer step
    kept_gradients: int = 0  # of these, there before the forward pass, too
    state: int = 0  # of the optimizer
    inputs: int = 0  # arguments of the outermost module, and targets of a Learner
    spent: int = 0  # of memory from before the fit: its kind, or freed since


@dataclass(frozen=True, slots=True)
class Shape:
    """The counters of one batch, in bytes: before its forward pass, after its loss (None without one), and at its peak."""

    before: int
    after_loss: int | None
    peak: int
    phase: str  # of the peak


def categories(peak: int, start: int, stock: Stock | None, shape: Shape | None, *, grows: bool = False) -> tuple[Category, ...]:
    """Return the bytes of each kind at the peak; they add up to `peak`.

    Args:
        peak: the most that was allocated.
        start: bytes allocated before the fit.
        stock: sizes of the tensors that stay from batch to batch, or None if unknown.
        shape: of the batch with the highest peak that was followed, or None without any.
        grows: memory grows from batch to batch: then the bytes beyond that batch's peak have grown since.
    """
    left = peak
    parts = []
    for name, nbytes in _wanted(start, stock, shape, peak - shape.peak if grows and shape is not None else 0):
        taken = min(nbytes, left)
        left -= taken
        if taken > 0:
            parts.append(Category(name, taken))
    if left:
        known = stock is not None and shape is not None
        parts.append(Category(TEMPORARIES if known else "of the fit, not told apart", left))
    return in_order(parts)


def in_order(parts: Iterable[Category]) -> tuple[Category, ...]:
    """Return categories in the order of display: lasting ones, passing ones, the rest."""
    return tuple(sorted(parts, key=lambda category: ORDER.index(category.name) if category.name in ORDER else len(ORDER)))


def _wanted(start: int, stock: Stock | None, shape: Shape | None, grown: int) -> Iterator[tuple[str, int]]:
    """Yield (category, bytes), the best known first: where they exceed the peak, the last get the rest."""
    if stock is None or shape is None:
        yield BEFORE, start
        return
    yield PARAMETERS, stock.parameters
    yield BUFFERS, stock.buffers
    yield STATE, stock.state
    yield INPUTS, stock.inputs
    staying = stock.parameters + stock.buffers + stock.state + stock.inputs + stock.kept_gradients
    unnamed = max(shape.before - staying, 0)
    older = min(max(start - stock.spent, 0), unnamed)
    yield BEFORE, older
    yield OTHER, unnamed - older + max(grown, 0)
    yield from _passing(stock, shape)


def _passing(stock: Stock, shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield gradients and activations. In the backward pass these give way to those: the larger ones were there in full."""
    activations = ACTIVATIONS, 0 if shape.after_loss is None else max(shape.after_loss - shape.before, 0)
    gradients = GRADIENTS, stock.gradients
    if shape.phase in (phases.FORWARD, phases.LOSS):
        yield GRADIENTS, stock.kept_gradients
        yield activations
    elif shape.phase in (phases.STEP, phases.ZERO_GRAD):
        yield gradients
    else:
        yield from sorted((gradients, activations), key=lambda part: -part[1])
