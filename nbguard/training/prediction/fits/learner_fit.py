"""The next fit of a fastai Learner as a copy without data, with model, loss, optimizer, callbacks, shapes of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.batches import FULL, MOST, BatchShapes, enough, sizes, trained_sizes
from nbguard.training.prediction.fits.copies import (
    CopiedCode,
    FirstBatch,
    batch_size_of,
    device_of,
    first_batch_for_device,
    in_order_of_moving,
    items_of,
    state_of,
    tensors_of_models,
)
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier, TracedCallbacks, copied_callback, unpacks, values_used

# --- A training step that the user wrote as a function of a batch, as a copy without data.


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


@dataclass(kw_only=True)
class LearnerFit:
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit itself will say it
            self.learner.fit(1)


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch to go by, and a loader's transforms of it on the device."""

    shapes: BatchShapes
    after_batch: Any  # a copy of the transforms that run there; None if none
    inputs: int  # parts of a batch that go to the model

    @classmethod
    def of(cls, first: FirstBatch, size: int | None) -> _Held:
        """Return the batch of a first one; `size` are the items of a batch of the fit, by default its own."""
        shapes = replace(BatchShapes.of(first.batch, size), is_on_host=first.comes_on_host)
        return cls(shapes, first.after_batch, first.inputs or max(1, len(shapes.shapes) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSource:
    """The fits of a fastai Learner."""

    learn: Any  # the user's
    trained: _Held  # batch to go by
    held_out: _Held | None = None  # batch of the validation; None if as the training's
    precision: str = ""  # "bf16" or "fp16": mixed precision besides the Learner's own
    names: Mapping[str, Any] = field(default_factory=dict)  # the user's, for lines that change the copy
    why_not: str = ""  # why callbacks of the user's are left out; empty if they are tried

    @classmethod
    def of(cls, learn: Any, batch: Any, precision: str = "") -> LearnerSource:
        """Return the fit of a Learner with the shapes of `batch`, or of the training set's first items if that is None.

        Raises:
            UnpredictableError: the Learner lacks a requirement of a fit, no batch can be made, or it has no tensor.
        """
        _check(learn)
        train, valid = loaders_of(learn)
        if batch is None:
            first = first_batch_for_device(train)
        else:
            try:
                first = replace(first_batch_for_device(train), batch=batch)
            except UnpredictableError:
                first = FirstBatch(batch, None, comes_on_host=False)
        held_out = None
        if batch is None and valid is not None and items_of(valid):
            with suppress(UnpredictableError):  # the training set's stands for it
                held_out = _Held.of(first_batch_for_device(valid), None)
        trained = _Held.of(first, batch_size_of(train) if batch is None else None)
        return cls(learn=learn, trained=trained, held_out=held_out, precision=precision)

    @property
    def batch(self) -> BatchShapes:
        """Return the shapes of a training batch."""
        return self.trained.shapes

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

    def without_tried_callbacks(self, reason: str) -> LearnerSource | None:
        """Return the same fit without the callbacks that cannot be traced, or None without such."""
        return replace(self, why_not=reason) if not self.why_not and TracedCallbacks.of(self.learn.cbs).tried else None

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> LearnerFit:
        """Return the next fit as a copy that runs without data. The generators of random numbers stay as they are."""
        fit = _learner_fit(self, batch_size, full_only=full_only)
        fit.names = dict(self.names)
        if self.precision:
            fit.change(PRECISIONS[self.precision])
        return fit


PRECISIONS = {name: f"import fastai.callback.fp16\nlearn.to_{name}()" for name in ("bf16", "fp16")}
"""The lines that switch mixed precision on."""


_DLS = "set learn.dls = DataLoaders(train, valid)"


def loaders_of(learn: Any) -> tuple[Any, Any]:
    """Return the loaders on which a Learner is trained and validated, None where there is no second one.

    Raises:
        UnpredictableError: its `dls` are none.
    """
    dls = vars(learn).get("dls")
    loaders = vars(dls).get("loaders") if hasattr(dls, "__dict__") else None
    if not isinstance(loaders, (list, tuple)):
        raise UnpredictableError(f"learn.dls is {_a(dls)}, not DataLoaders: {_DLS}")
    if not loaders:
        raise UnpredictableError(f"learn.dls has no loaders: {_DLS}")
    return loaders[0], loaders[1] if len(loaders) > 1 else None


def _check(learn: Any) -> None:
    """Refuse a Learner that lacks a requirement of a fit, in its own words."""
    model = vars(learn).get("model")
    if not isinstance(model, torch.nn.Module):
        raise UnpredictableError(f"learn.model is {_a(model)}, not a torch.nn.Module")
    for name, example in (("loss_func", "CrossEntropyLossFlat()"), ("opt_func", "Adam")):
        value = vars(learn).get(name)
        if not callable(value):
            raise UnpredictableError(f"learn.{name} is {_a(value)}, not a function: set learn.{name} = {example}")


def _a(value: Any) -> str:
    """Return the class of a value with its article: `a list`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _learner_fit(source: LearnerSource, batch_size: int | None, *, full_only: bool) -> LearnerFit:
    from fastai.learner import Learner

    learn, batch = source.learn, source.batch
    loader, valid = loaders_of(learn)
    wanted = batch_size or batch.size
    count = items_of(loader)
    if count is not None and batch_size_of(loader) is None:
        count *= batch.items  # each item is a batch
    is_last_dropped = full_only or bool(getattr(loader, "drop_last", False))
    number = FULL * wanted if count is None else count
    trained = trained_sizes(number, wanted, is_last_dropped=is_last_dropped, full=MOST)
    memo: dict[int, Any] = {}
    copier = FunctionCopier(memo, device_of([learn.model]))
    shadow = Learner.__new__(Learner)
    memo[id(learn)] = shadow
    model = copier.copy(learn.model)
    held = source.held_out or source.trained
    held_out: tuple[int, ...] = ()
    if valid is not None:
        own = batch_size_of(valid) or held.shapes.size
        total = items_of(valid)
        own = own if batch_size is None else max(1, own * batch_size // batch.size)
        held_out = sizes(own if total is None else total, own, is_last_dropped=False)
    dls = _Loaders(
        _Batches(batch, trained, copier.copy(source.trained.after_batch) or _unchanged, _rounds(learn)),
        _Batches(held.shapes, held_out, copier.copy(held.after_batch) or _unchanged),
        source.trained.inputs,
    )
    memo |= {id(learn.dls): dls, id(loader): dls.train, id(loader.dataset): loader.dataset}
    if valid is not None:
        memo |= {id(valid): dls.valid, id(valid.dataset): valid.dataset}
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
    callbacks = TracedCallbacks.of(learn.cbs)
    for callback in callbacks.known:
        shadow.add_cb(copied_callback(copier, callback))
    for callback in callbacks.tried:
        try:
            if source.why_not:
                raise UnpredictableError(source.why_not)
            shadow.add_cb(copied_callback(copier, callback))
        except UnpredictableError as error:
            callbacks.leave_out(type(callback).__name__, str(error))
    return LearnerFit(
        learner=shadow,
        names={},
        items=ENDLESS if count is None else count,
        batches=max(1, -(-number // wanted)),
        left_out=tuple(callbacks.left_out),
    )


def _rounds(learn: Any) -> int:
    """Return the full batches that show all that a Learner does: a GAN trains its two parts in turn."""
    turns = [callback for callback in learn.cbs if type(callback).__name__ == "FixedGANSwitcher"]
    numbers = [getattr(each, name) for each in turns for name in ("n_crit", "n_gen")]
    return max(FULL, 2 * sum(number if isinstance(number, int) else MOST // 4 for number in numbers))


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
