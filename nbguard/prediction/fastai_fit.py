"""The next fit of a fastai Learner as a copy without data: model, loss, optimizer, callbacks, shapes of batches."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.prediction.copies import copied

_ENDLESS = 2**24
"""Items of a training set that does not say how many it has."""
_FULL = 3
"""Full training batches of a trace: the optimizer's state is there from the first on, later ones repeat the second."""
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


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a batch: enough to make one like it without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: type[Any]  # the tensor's class, such as fastai's TensorImage

    @classmethod
    def of(cls, tensor: Any) -> TensorShape:
        """Return that of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, type(tensor))

    def cut(self, whole: int, items: int) -> TensorShape:
        """Return that of a batch of so many `items` instead of `whole`; what has no dimension of that size stays."""
        if not self.shape or self.shape[0] != whole:
            return self
        return TensorShape((items, *self.shape[1:]), self.stride, self.dtype, self.kind)

    def make(self) -> Any:
        """Return a new tensor of that shape on the meta device."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor if self.kind is torch.Tensor else tensor.as_subclass(self.kind)


class _Batches:
    """A loader of batches without data. The loop of its iterator holds what fastai's `DataLoader.__iter__` holds."""

    def __init__(self, batches: Sequence[Any], after_batch: Any) -> None:
        self.batches = batches
        self.bs = 0
        self.dataset = ()
        self._after_batch = after_batch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for b in self.batches:
            b = _made(b)  # the name keeps the batch before it was transformed, as there
            yield self._after_batch(b)


@dataclass(kw_only=True)
class FastaiFit:
    """A copy of a Learner that can be fitted without data."""

    model: Any  # the copy of the model
    learner: Any  # the copy of the Learner
    items: int  # in the training set; more than any GPU has room for where that is not known
    batches: int  # training batches of an epoch
    sizes: tuple[int, ...]  # items of the training batches that are traced
    left_out: tuple[str, ...] = ()  # callbacks that are not traced and may keep memory
    notes: list[str] = field(default_factory=list)  # assumptions in words

    def run(self) -> None:
        """Fit one epoch, with its validation, without a word."""
        self.learner.logger = _unchanged
        self.learner.fit(1)


def is_learner(obj: Any) -> bool:
    """Return whether an object is a fastai Learner, without importing fastai."""
    fastai: Any = sys.modules.get("fastai.learner")
    return fastai is not None and issubclass(type(obj), fastai.Learner)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchToGoBy:
    """A batch in shapes, of which larger and smaller ones are made."""

    shapes: Any  # `TensorShape` where the batch has a tensor
    items: int  # in it
    size: int  # items of a batch of the fit, unless another size is asked for


def batch_to_go_by(learn: Any, batch: Any) -> BatchToGoBy:
    """Return the shapes of `batch`, or of the first items of the training set if that is None.

    Raises:
        UnpredictableError: no batch can be made, or it has no tensor.
    """
    if batch is not None:
        shapes = _shapes(batch)
        return BatchToGoBy(shapes=shapes, items=_items(shapes), size=_items(shapes))
    size = _batch_size(learn.dls.train, 1)
    shapes = _first_batch(learn.dls.train, size)
    return BatchToGoBy(shapes=shapes, items=_items(shapes), size=size)


def fastai_fit(learn: Any, batch: BatchToGoBy, batch_size: int | None, *, full_only: bool = False) -> FastaiFit:
    """Return the next fit of `learn` as a copy that runs without data.

    Args:
        learn: the Learner. It is read, and stays as it is; so do the generators of random numbers.
        batch: a batch to go by.
        batch_size: items of a batch; None: the loader's, or those of the batch that the user gave.
        full_only: the last training batch is left out if it is smaller.

    Raises:
        UnpredictableError: something cannot be copied; the message names it.
    """
    from fastai.learner import Learner

    loader, valid = learn.dls.train, learn.dls.valid if len(learn.dls.loaders) > 1 else None
    size, shapes, items = _batch_size(loader, 1), batch.shapes, batch.items
    wanted = batch_size or batch.size
    has_length = hasattr(loader.dataset, "__len__")
    count = len(loader.dataset) if has_length else _FULL * wanted
    sizes = _sizes(count, wanted, is_last_dropped=full_only or bool(getattr(loader, "drop_last", False)))
    memo: dict[int, Any] = {}
    shadow = Learner.__new__(Learner)
    memo[id(learn)] = shadow
    model = copied(learn.model, memo)
    after_train, after_valid = (copied(getattr(each, "after_batch", None), memo) or _unchanged for each in (loader, valid))
    if valid is None:
        valid_sizes: tuple[int, ...] = ()
    else:
        total = len(valid.dataset) if hasattr(valid.dataset, "__len__") else wanted
        own = _batch_size(valid, wanted)
        valid_sizes = _sizes(total, own if batch_size is None else max(1, own * batch_size // size), is_last_dropped=False)
    dls = _Loaders(
        _Batches([_cut(shapes, items, each) for each in sizes], after_train),
        _Batches([_cut(shapes, items, each) for each in valid_sizes], after_valid),
        int(getattr(learn.dls, "n_inp", max(1, len(shapes) - 1))),
    )
    kept, left_out = _callbacks(learn.cbs)
    shadow.__init__(
        dls,
        model,
        loss_func=copied(learn.loss_func, memo),
        opt_func=copied(learn.opt_func, memo),
        lr=learn.lr,
        splitter=learn.splitter,
        metrics=copied(list(learn.metrics), memo),
        path=learn.path,
        wd=learn.wd,
        wd_bn_bias=learn.wd_bn_bias,
        train_bn=learn.train_bn,
        moms=learn.moms,
        default_cbs=False,
    )
    for callback in kept:
        shadow.add_cb(copied(callback, memo))
    return FastaiFit(
        model=model,
        learner=shadow,
        items=count if has_length else _ENDLESS,
        batches=max(1, -(-count // wanted)),
        sizes=sizes,
        left_out=tuple(left_out),
    )


def _batch_size(loader: Any, default: int) -> int:
    """Return the items of a loader's batches: of fastai's, or of torch's own."""
    return int(getattr(loader, "bs", None) or getattr(loader, "batch_size", None) or default)


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


def _sizes(count: int, size: int, *, is_last_dropped: bool) -> tuple[int, ...]:
    """Return the items of the batches to trace: a few full ones, and the last one if it is smaller."""
    last = count % size
    full = min(count // size, _FULL)
    return (size,) * full + ((last,) if last and not is_last_dropped else ())


@contextmanager
def same_randomness() -> Iterator[None]:
    """Put the generators of random numbers back as they were: Python's, numpy's and torch's for the CPU."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _first_batch(loader: Any, size: int) -> Any:
    """Return the shapes of a batch of the first items, made by a copy of the loader that shares its dataset."""
    if not hasattr(loader, "do_item"):
        raise UnpredictableError(f"{type(loader).__name__} is no loader of fastai's: give a batch, as in predict(learn, batch)")
    with same_randomness():
        own = copy.copy(loader)
        own.__dict__["rng"] = random.Random(0)  # noqa: S311 - no secret: the loader's own generator stays as it is
        for name in ("after_item", "before_batch"):
            if name in own.__dict__:
                own.__dict__[name] = copy.deepcopy(own.__dict__[name])
        try:
            items = [own.do_item(place) for place in range(min(size, len(loader.dataset)))]
            return _shapes(own.do_batch([item for item in items if item is not None]))
        except Exception as error:  # noqa: BLE001 - whatever the user's dataset raises is the reason
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    raise UnpredictableError(
        f"no batch could be made of the training set's first items ({reason}): give one, as in predict(learn, batch)"
    )


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorShape.of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_shapes(each) for each in value) if type(value) in (tuple, list) else tuple(map(_shapes, value))
    if isinstance(value, dict):
        return {name: _shapes(each) for name, each in value.items()}
    return value


def _made(value: Any) -> Any:
    """Return a batch of tensors without data from their shapes."""
    return _each(value, TensorShape.make)


def _cut(value: Any, whole: int, items: int) -> Any:
    return _each(value, lambda shape: shape.cut(whole, items))


def _each(value: Any, act: Any) -> Any:
    if isinstance(value, TensorShape):
        return act(value)
    if type(value) in (tuple, list):
        return type(value)(_each(part, act) for part in value)
    if type(value) is dict:
        return {name: _each(part, act) for name, part in value.items()}
    return value


def _items(value: Any) -> int:
    """Return the items of a batch: the first dimension of its first tensor."""
    lengths: list[int] = []
    _each(value, lambda shape: lengths.append(shape.shape[0] if shape.shape else 1))
    if not lengths:
        raise UnpredictableError("the batch has no tensor")
    return lengths[0]
