"""The next fit of a fastai Learner as a copy without data: model, loss, optimizer, callbacks, shapes of batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from nbguard.prediction.fits.batches import FULL, MOST, BatchShapes, enough, sizes
from nbguard.prediction.fits.copies import device_of, in_order_of_moving, tensors_of_models
from nbguard.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.prediction.fits.functions import FunctionCopier
from nbguard.prediction.fits.loaders import batch_size_of, first_batch

_KEPT = frozenset(
    {
        "BnFreeze",
        "CastToTensor",
        "ChannelsLast",
        "CutMix",
        "GradientAccumulation",
        "GradientClip",
        "MixUp",
        "MixedPrecision",
        "ModelResetter",
        "ParamScheduler",
        "RNNCallback",
        "RNNRegularizer",
        "Recorder",
        "TrainEvalCallback",
    }
)
"""Callbacks of fastai's that take part in the trace."""
_WITHOUT_MEMORY = frozenset(
    {
        "CSVLogger",
        "EarlyStoppingCallback",
        "ProgressCallback",
        "ReduceLROnPlateau",
        "SaveModelCallback",
        "ShowGraphCallback",
        "TensorBoardCallback",
        "TerminateOnNaNCallback",
        "WandbCallback",
    }
)
"""Callbacks of fastai's that stay out of the trace, as they keep nothing on the device."""


class _Batches:
    """A loader of batches without data. The loop of its iterator holds what fastai's `DataLoader.__iter__` holds.

    Args:
        batch: the shapes to go by.
        sizes: items of the batches: full ones, of which as many are made as show something new, and the last.
        after_batch: transforms of batches.
    """

    def __init__(self, batch: BatchShapes, sizes: tuple[int, ...], after_batch: Any) -> None:
        self.bs = 0
        self.dataset = ()
        self.make: MakeBatch | None = None
        """What makes a batch of its shapes; None: none is made yet."""
        self.made: list[int] = []
        """Items of the batches that there were."""
        self._batch, self._after_batch = batch, after_batch
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
        for items in chain(enough(self._full, make), self._last):
            self.made.append(items)
            b = make(self._batch.cut(items))  # the name keeps the batch before it was transformed, as there
            yield self._after_batch(b)


@dataclass(kw_only=True)
class FastaiFit:
    """A copy of a Learner that can be fitted without data."""

    learner: Any  # the copy
    names: dict[str, Any]  # that lines which change it may use
    items: int  # in the training set; more than any GPU has room for where that is not known
    batches: int  # training batches of an epoch
    device: str = "cuda"
    has_optimizer: bool = True
    left_out: tuple[str, ...] = ()  # callbacks that are not traced and may keep memory, in words

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the items of the training batches."""
        sizes: tuple[int, ...] = self.learner.dls.train.sizes
        return sizes

    @property
    def models(self) -> Iterable[Any]:
        """Return the copy of the model."""
        return (self.learner.model,)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the model."""
        return in_order_of_moving(self.learner.model)

    def change(self, code: str) -> None:
        """Run lines that change the Learner `learn`."""
        exec(code, {**self.names, "learn": self.learner})  # noqa: S102 - our own lines, the same that are shown

    def run(self, make: MakeBatch) -> None:
        """Fit one epoch, with its validation, without a word."""
        for loader in (self.learner.dls.train, self.learner.dls.valid):
            loader.make = make
        self.learner.logger = _unchanged
        self.learner.fit(1)


def is_learner(obj: Any) -> bool:
    """Return whether an object is a fastai Learner, without importing fastai."""
    fastai: Any = sys.modules.get("fastai.learner")
    return fastai is not None and issubclass(type(obj), fastai.Learner)


@dataclass(frozen=True, slots=True)
class LearnerSource:
    """The fits of a fastai Learner."""

    learn: Any  # the user's
    batch: BatchShapes  # to go by
    precision: str = ""  # "bf16" or "fp16": mixed precision besides what the Learner has
    names: Mapping[str, Any] = field(default_factory=dict)  # the user's, for lines that change the copy

    @classmethod
    def of(cls, learn: Any, batch: Any, precision: str = "") -> LearnerSource:
        """Return that of a Learner with the shapes of `batch`, or of the training set's first items if that is None.

        Raises:
            UnpredictableError: no batch can be made, or it has no tensor.
        """
        if batch is not None:
            return cls(learn, BatchShapes.of(batch), precision)
        size = batch_size_of(learn.dls.train, 1)
        return cls(learn, BatchShapes.of(first_batch(learn.dls.train), size), precision)

    @property
    def size(self) -> int:
        """Return the items of a batch."""
        return self.batch.size

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return the model."""
        return (("model", self.learn.model),)

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the tensors of the model and of the optimizer."""
        yield from tensors_of_models([self.learn.model])
        for state in self.learn.opt.state.values() if self.learn.opt else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> FastaiFit:
        """Return the next fit as a copy that runs without data. The generators of random numbers stay as they are."""
        fit = _fastai_fit(self.learn, self.batch, batch_size, full_only=full_only)
        fit.names = dict(self.names)
        if self.precision:
            fit.change(PRECISIONS[self.precision])
        return fit


PRECISIONS = {name: f"import fastai.callback.fp16\nlearn.to_{name}()" for name in ("bf16", "fp16")}
"""The lines that switch mixed precision on."""


def _fastai_fit(learn: Any, batch: BatchShapes, batch_size: int | None, *, full_only: bool) -> FastaiFit:
    from fastai.learner import Learner

    loader, valid = learn.dls.train, learn.dls.valid if len(learn.dls.loaders) > 1 else None
    size = batch_size_of(loader, 1)
    wanted = batch_size or batch.size
    has_length = hasattr(loader.dataset, "__len__")
    count = len(loader.dataset) if has_length else FULL * wanted
    is_last_dropped = full_only or bool(getattr(loader, "drop_last", False))
    trained = sizes(count, wanted, is_last_dropped=is_last_dropped, full=MOST)
    memo: dict[int, Any] = {}
    copier = FunctionCopier(memo, device_of([learn.model]))
    shadow = Learner.__new__(Learner)
    memo[id(learn)] = shadow
    model = copier.copy(learn.model)
    after_train, after_valid = (copier.copy(getattr(each, "after_batch", None)) or _unchanged for each in (loader, valid))
    if valid is None:
        held_out: tuple[int, ...] = ()
    else:
        total = len(valid.dataset) if hasattr(valid.dataset, "__len__") else wanted
        own = batch_size_of(valid, wanted)
        held_out = sizes(total, own if batch_size is None else max(1, own * batch_size // size), is_last_dropped=False)
    dls = _Loaders(
        _Batches(batch, trained, after_train),
        _Batches(batch, held_out, after_valid),
        int(getattr(learn.dls, "n_inp", max(1, len(batch.shapes) - 1))),
    )
    kept, left_out = _callbacks(learn.cbs)
    shadow.__init__(
        dls,
        model,
        loss_func=copier.copy(learn.loss_func),
        opt_func=copier.copy(learn.opt_func),
        lr=learn.lr,
        splitter=learn.splitter,
        metrics=copier.copy(list(learn.metrics)),
        path=learn.path,
        wd=learn.wd,
        wd_bn_bias=learn.wd_bn_bias,
        train_bn=learn.train_bn,
        moms=learn.moms,
        default_cbs=False,
    )
    for callback in kept:
        shadow.add_cb(copier.copy(callback))
    return FastaiFit(
        learner=shadow,
        names={},
        items=count if has_length else ENDLESS,
        batches=max(1, -(-count // wanted)),
        left_out=tuple(f"the callback {name} is not traced" for name in left_out),
    )


class _Loaders:
    """The pair of loaders that a Learner asks for its batches."""

    def __init__(self, train: _Batches, valid: _Batches, n_inp: int) -> None:
        self.train, self.valid, self.n_inp = train, valid, n_inp
        self.device = torch.device("meta")
        self.path = "."

    def __getitem__(self, place: int) -> _Batches:
        return (self.train, self.valid)[place]


def _unchanged(batch: Any) -> Any:
    return batch


def _callbacks(callbacks: Any) -> tuple[list[Any], list[str]]:
    """Return the callbacks that take part in the trace, and the names of those whose memory is not known."""
    kept, unknown = [], []
    for callback in callbacks:
        kind = type(callback)
        is_fastais = str(kind.__module__).partition(".")[0] == "fastai"
        if is_fastais and kind.__name__ in _KEPT:
            kept.append(callback)
        elif not (is_fastais and kind.__name__ in _WITHOUT_MEMORY):
            unknown.append(kind.__name__)
    return kept, unknown
