"""A loop that trains, as it stands in a script, as a copy without data, whose loaders yield batches of their shapes.

`few` and `goes_on` are put into a script's loops: in a trace these end when they have nothing new to show, else they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.batches import FULL, MOST, STEPS, BatchShapes, enough, sizes, trained_sizes
from nbguard.training.prediction.fits.copies import (
    CopiedCode,
    batch_size_of,
    device_of,
    first_batch,
    state_of,
    tensors_of_models,
)
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier, values_used

_tracing: ContextVar[LoopFit | None] = ContextVar("tracing", default=None)


def is_tracing() -> bool:
    """Say whether a loop is being traced here."""
    return _tracing.get() is not None


def few(items: Iterable[Any]) -> Iterable[Any]:
    """Return the loop's iterable; in a trace the loop ends when it has nothing new to show."""
    return items if _tracing.get() is None else _few(items, goes_on())


def _few(items: Iterable[Any], has_next: Callable[[], bool]) -> Iterator[Any]:
    for item in items:
        if not has_next():
            return
        yield item


def goes_on() -> Callable[[], bool]:
    """Return a function that says before each round of a loop whether it goes on.

    In a trace a loop ends when the loader that is trained on was gone through in it, or after a few rounds with steps of an
    optimizer; where the optimizer is not known, with backward passes. Other loops end by themselves.
    """
    fit = _tracing.get()
    if fit is None or fit.make is None:
        return lambda: True
    make, rounds = fit.make, count()
    steps, passes, ended, made = make.steps, make.passes, fit.ended, len(fit.made)

    def has_next() -> bool:
        is_shown = make.steps >= steps + STEPS or (not fit.has_optimizer and make.passes > passes)
        is_own = len(fit.made) == made  # no loader, which ends by itself, gives the loop its batches
        is_over = fit.ended > ended or make.passes > passes + MOST
        return not (is_over or (next(rounds) >= FULL and is_shown and is_own))

    return has_next


class _Batches:
    """Stands for a loader of PyTorch's in a trace."""

    def __init__(self, loader: Any, shapes: BatchShapes | UnpredictableError, items: tuple[int, ...], fit: LoopFit) -> None:
        self._loader, self._shapes, self._items, self._fit = loader, shapes, items, fit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        make, shapes = self._fit.make, self._shapes
        if isinstance(shapes, UnpredictableError):
            raise UnpredictableError(str(shapes))
        if make is None:
            return
        full = [size for size in self._items if size == self._items[0]]
        for size in chain(enough(full, make, has_optimizer=self._fit.has_optimizer), self._items[len(full) :]):
            if self is self._fit.main:
                self._fit.made.append(size)
            yield make(shapes.cut(size), on_host=getattr(self._loader, "device", None) is None)
        self._fit.ended += self is self._fit.main


@dataclass(kw_only=True)
class LoopFit(CopiedCode):
    """A copy of a loop and of all that it refers to."""

    loop: Callable[[], None]  # the copy
    device: str  # kind of device on which the models are
    items: int
    batches: int | None
    size: int  # items of a batch of the main loader; 0 if the loop makes its batches itself
    left_out: tuple[str, ...] = ()
    main: Any = None  # stands for the loader that is trained on
    make: MakeBatch | None = None
    made: list[int] = field(default_factory=list)  # items of the training batches that there were
    ended: int = 0  # times that this loader was gone through

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the items of the batches that there were."""
        return tuple(self.made) or (self.size,)

    def run(self, make: MakeBatch) -> None:
        """Run the loop until it shows nothing new."""
        self.make = make
        if self.main is None:
            make(())
        token = _tracing.set(self)
        try:
            self.loop()
        finally:
            _tracing.reset(token)


@dataclass(frozen=True, slots=True)
class LoopSource:
    """A loop of the user's."""

    loop: Callable[[], None]
    loaders: tuple[tuple[Any, BatchShapes | UnpredictableError], ...]  # that it refers to, the one to train on first

    @classmethod
    def of(cls, loop: Callable[[], None]) -> LoopSource:
        """Return the fit of a loop, with a batch of the first items of each of its loaders."""
        loaders = [value for value in values_used(loop) if isinstance(value, torch.utils.data.DataLoader)]
        return cls(loop, tuple((loader, _shapes(loader)) for loader in loaders))

    @property
    def size(self) -> int:
        """Return the items of a batch; 0 if the loop makes its batches itself."""
        return (batch_size_of(self.loaders[0][0]) or 1) if self.loaders else 0

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return the modules that the loop refers to."""
        return [(self._name(value, "model"), value) for value in values_used(self.loop) if isinstance(value, torch.nn.Module)]

    @property
    def optimizers(self) -> Iterable[tuple[str, Any]]:
        """Return the optimizers of PyTorch's that the loop refers to."""
        values = [value for value in values_used(self.loop) if isinstance(value, torch.optim.Optimizer)]
        return [(self._name(value, "optimizer"), value) for value in values]

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the tensors of its models and optimizers."""
        yield from tensors_of_models(module for _, module in self.modules)
        for _, optimizer in self.optimizers:
            yield from state_of(optimizer)

    def _name(self, value: Any, default: str) -> str:
        namespace: Mapping[str, Any] = getattr(self.loop, "__globals__", {})
        return next((name for name, each in namespace.items() if each is value), default)

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> LoopFit:
        """Return a copy of the loop that runs without data."""
        named = list(self.modules)
        if not named:
            raise UnpredictableError("the loop refers to no model that exists before it")
        if batch_size and not self.loaders:
            raise UnpredictableError("the loop makes its batches itself, so their size is set in the script")
        models = [module for _, module in named]
        memo: dict[int, Any] = {}
        device = device_of(models)
        main = self.loaders[0][0] if self.loaders else None
        wanted = batch_size or self.size
        items = _count(main, wanted)
        fit = LoopFit(
            loop=_unset,
            namespace={},
            names=(*(name for name, _ in named), *(name for name, _ in self.optimizers)),
            models=(),
            optimizers=(),
            device=device,
            items=items if main is not None and hasattr(main.dataset, "__len__") else ENDLESS,
            batches=max(1, -(-items // wanted)) if main is not None else None,
            size=wanted,
        )
        for loader, shapes in self.loaders:
            own = batch_size_of(loader) or 1
            size = own if batch_size is None else max(1, own * batch_size // self.size)
            last = bool(loader.drop_last) or (full_only and loader is main)
            cut = (trained_sizes if loader is main else sizes)(_count(loader, size), size, is_last_dropped=last, full=MOST)
            memo[id(loader)] = _Batches(loader, shapes, cut, fit)
        fit.main = memo.get(id(main))
        copier = FunctionCopier(memo, device)
        fit.models = tuple(map(copier.copy, models))
        fit.loop = copier.copy(self.loop)
        fit.namespace = copier.namespace(getattr(self.loop, "__globals__", {}))
        fit.optimizers = tuple(copier.copy(optimizer) for _, optimizer in self.optimizers)
        return fit


def _unset() -> None:
    """Stand for a loop that is not copied yet."""


def _shapes(loader: Any) -> BatchShapes | UnpredictableError:
    """Return the shapes of a loader's batches, or why there are none: a loader that is not used in the fit needs none."""
    try:
        return BatchShapes.of(first_batch(loader), batch_size_of(loader))
    except UnpredictableError as error:
        return error


def _count(loader: Any, size: int) -> int:
    """Return the items of a loader's set; as many as make a few batches where it does not say it."""
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else FULL * size
