"""A training step that the user wrote as a function of a batch, as a copy without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.batches import FULL, BatchShapes, enough
from nbguard.training.prediction.fits.copies import CopiedCode, device_of, state_of, tensors_of_models
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier, unpacks, values_used


@dataclass(kw_only=True)
class StepFit(CopiedCode):
    """A copy of a step and of all that it refers to."""

    step: Callable[[Any], Any]  # the copy
    device: str  # kind of device on which the models are
    is_on_host: bool  # batches come on the host, and the step itself moves them
    size: int  # items of each batch
    shapes: Any  # of each batch
    unpacks: bool  # a batch goes to the step as several arguments
    prepare: Callable[[], Any] | None = None  # the copy of the code that runs once before
    items: int = ENDLESS
    batches: int | None = None
    left_out: tuple[str, ...] = ()
    made: int = 0  # batches that there were

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the items of the batches that there were, or of the first one."""
        return (self.size,) * max(1, self.made)

    def run(self, make: MakeBatch) -> None:
        """Call the step for each batch, as a loop does that keeps its result until the next."""
        if self.prepare is not None:
            self.prepare()
        for number in enough(count(1), make, has_optimizer=self.has_optimizer):
            self.made = number
            batch = make(self.shapes, on_host=self.is_on_host)
            loss = self.step(*batch) if self.unpacks else self.step(batch)  # noqa: F841 - a loop's name for it lives as long


@dataclass(frozen=True, slots=True)
class StepSource:
    """A step of the user's."""

    step: Callable[..., Any]
    batch: BatchShapes  # to go by
    unpacks: bool = False  # a batch goes to the step as several arguments
    prepare: Callable[[], Any] | None = None  # runs once before the first step

    @classmethod
    def of(cls, step: Callable[..., Any], batch: Any, prepare: Callable[[], Any] | None = None) -> StepSource:
        """Return the fit of a step with the shapes of `batch`."""
        return cls(step, BatchShapes.of(batch), unpacks(step, batch), prepare)

    @property
    def size(self) -> int:
        """Return the items of a batch."""
        return self.batch.size

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return the modules that the step refers to."""
        return [(_name(self.step, value, "model"), value) for value in self._values if isinstance(value, torch.nn.Module)]

    @property
    def optimizers(self) -> Iterable[tuple[str, Any]]:
        """Return the optimizers of PyTorch's that the step refers to."""
        return [(_name(self.step, each, "optimizer"), each) for each in self._values if isinstance(each, torch.optim.Optimizer)]

    @property
    def _values(self) -> list[Any]:
        """Return the objects that the step, and the code before it, lead to."""
        values = [*values_used(self.step), *(values_used(self.prepare) if self.prepare else ())]
        return list({id(value): value for value in values}.values())

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the tensors of its models and optimizers."""
        yield from tensors_of_models(module for _, module in self.modules)
        for _, optimizer in self.optimizers:
            yield from state_of(optimizer)

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> StepFit:  # noqa: ARG002 - all batches are full
        """Return a copy of the step that runs without data."""
        size = batch_size or self.size
        models = [module for _, module in self.modules]
        if not models:
            raise UnpredictableError(
                "the step refers to no model; give it one as a global name, a closure or functools.partial"
            )
        memo: dict[int, Any] = {}
        device = device_of(models)
        copier = FunctionCopier(memo, device)
        own = [copier.copy(model) for model in models]
        step, prepare = copier.copy(self.step), copier.copy(self.prepare)
        used = list(self.optimizers)
        return StepFit(
            step=step,
            namespace=copier.namespace(getattr(self.step, "__globals__", {})),
            names=tuple(name for name, _ in (*self.modules, *used)),
            models=tuple(own),
            optimizers=tuple(copier.copy(optimizer) for _, optimizer in used),
            device=device,
            is_on_host=self.batch.is_on_host,
            size=size,
            shapes=self.batch.cut(size),
            unpacks=self.unpacks,
            prepare=prepare,
        )


def _name(step: Any, value: Any, default: str) -> str:
    """Return the name of a model or an optimizer in the namespace of a step, or the word for such a one."""
    namespace = getattr(step, "__globals__", {})
    return next((name for name, each in namespace.items() if each is value), default)


class _Batches:
    """A loader of batches without data. The loop of its iterator holds the same as fastai's `DataLoader.__iter__`.

    Args:
        shapes: of the batch to go by.
        sizes: items of the batches: full ones, as many as show something new, and the last.
        after_batch: a copy without data of the transforms.
        few: full batches that show all.
    """

    def __init__(self, shapes: BatchShapes, sizes: tuple[int, ...], after_batch: Any, few: int = FULL) -> None:
        self.bs = 0
        self.dataset = ()
        self.make: MakeBatch | None = None
        """Maker of a batch of its shapes; None until one was made."""
        self.made: list[int] = []
        """Items of the batches that there were."""
        self._shapes, self._after_batch, self._few = shapes, after_batch, few
        self._full = [items for items in sizes if items == sizes[0]]
        self._last = [items for items in sizes if items != sizes[0]]

    def __len__(self) -> int:
        return len(self._full) + len(self._last)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the items of the batches that there were, or of the first one if there was none."""
        return tuple(self.made or (*self._full, *self._last)[:1])

    def __iter__(self) -> Iterator[Any]:
        make = self.make
        if make is None:
            return
        for items in chain(enough(self._full, make, few=self._few), self._last):
            self.made.append(items)
            b = make(self._shapes.cut(items), on_host=self._shapes.is_on_host)  # the name keeps the transformed batch, as there
            yield self._after_batch(b)
