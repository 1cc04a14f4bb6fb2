"""The next fit of a fastai Learner as a copy without data, with model, loss, optimizer, callbacks, shapes of batches."""

from __future__ import annotations

import builtins
import dis
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.batches import FULL, MOST, BatchShapes, sizes, trained_sizes
from nbguard.training.prediction.fits.copies import copied_beside_model, device_of, in_order_of_moving, tensors_of_models
from nbguard.training.prediction.fits.first_batch import FirstBatch, batch_size_of, first_batch_for_device, items_of
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import OUTPUT, FunctionCopier, is_empty, is_users, names_used
from nbguard.training.prediction.fits.step_fit import _Batches

# --- Callbacks of a Learner in a trace: those that take part, those that cannot keep memory, and copies of the user's own


_KNOWN = frozenset(
    {
        "BnFreeze",
        "CastToTensor",
        "ChannelsLast",
        "CutMix",
        "FixedGANSwitcher",
        "GANDiscriminativeLR",
        "GANTrainer",
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
"""Callbacks of fastai's without which the trace is not the fit."""
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
_DECIDING = frozenset({"AdaptiveGANSwitcher"})
"""Callbacks of fastai's whose training decisions depend on values."""
_HARMLESS = OUTPUT | {
    "__future__",
    "abc",
    "builtins",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "enum",
    "fastai",
    "fastcore",
    "fastprogress",
    "functools",
    "gc",
    "itertools",
    "math",
    "numbers",
    "numpy",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "time",
    "torch",
    "torchmetrics",
    "torchvision",
    "types",
    "typing",
}
"""Packages without effects beyond the process, but for files that a trace writes nowhere."""
_FORBIDDEN = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input"})
"""Built-in functions that let code do things its names do not tell."""


@dataclass(slots=True)
class TracedCallbacks:
    """The fate of a Learner's callbacks in a trace."""

    known: list[Any] = field(default_factory=list)  # fastai's, that take part
    tried: list[Any] = field(default_factory=list)  # others that run on the copy; where the trace fails they are left out
    left_out: list[str] = field(default_factory=list)  # in words: untraced parts that may keep memory

    @classmethod
    def of(cls, callbacks: Iterable[Any]) -> TracedCallbacks:
        """Return the traced callbacks of a Learner."""
        own = cls()
        for callback in callbacks:
            kind = type(callback)
            name, is_fastais = kind.__name__, str(kind.__module__).partition(".")[0] == "fastai"
            if is_fastais and name in _WITHOUT_MEMORY:
                continue
            if is_fastais and name in _KNOWN:
                own.known.append(callback)
            elif reason := "" if is_fastais else _reason_not_to_run(callback):
                own.leave_out(name, reason)
            else:
                own.tried.append(callback)
                if is_fastais and name in _DECIDING:
                    own.left_out.append(f"the callback {name} chooses what to train by values")
        return own

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a callback does not take part."""
        self.left_out.append(f"the callback {name} is not traced: {reason}")


def copied_callback(copier: FunctionCopier, callback: Any) -> Any:
    """Return a copy of a callback that changes nothing of the user's: its class's functions and attributes are copies, too.

    Args:
        copier: has copied the model already.
        callback: the user's.

    Raises:
        UnpredictableError: something in it cannot be copied.
    """
    own = copied_beside_model(callback, copier.memo)
    for name, value in tuple(vars(own).items()):
        if type(value) is FunctionType:
            vars(own)[name] = copier.copy(value)
        elif type(value) is MethodType and type(value.__func__) is FunctionType:
            vars(own)[name] = MethodType(copier.copy(value.__func__), own)
    try:
        kind = _own_class(copier, type(callback), {})
        if kind is not type(own):
            object.__setattr__(own, "__class__", kind)  # a callback's own __setattr__ warns
    except TypeError as error:
        raise UnpredictableError(f"its class cannot be copied ({error})") from None
    return own


def _own_class(copier: FunctionCopier, kind: type, known: dict[type, type]) -> type:
    """Return a class derived from one of the user's that has copies of its definitions, and so of the classes below it."""
    if kind in known or not _is_users_class(kind):
        return known.get(kind, kind)
    bases = [_own_class(copier, base, known) for base in kind.__bases__ if _is_users_class(base)]
    space = {name: _copied_attribute(copier, value) for name, value in vars(kind).items() if _is_copied(name, value)}
    space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": None}
    known[kind] = type(kind)(kind.__name__, (kind, *bases), space)
    return known[kind]


def _is_copied(name: str, value: Any) -> bool:
    if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
        return True
    return not name.startswith("__") and type(value) in (list, dict, set)


def _copied_attribute(copier: FunctionCopier, value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(copier.copy(value.__func__))
    if isinstance(value, property):
        return property(*map(copier.copy, (value.fget, value.fset, value.fdel)))
    return copier.copy(value)


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and kind.__module__ != "builtins" and is_users(vars(module))


def _reason_not_to_run(callback: Any) -> str:
    """Return why a callback of the user's does not run in a trace, or "" where its code stays within the process."""
    waiting: list[Any] = [type(callback), *vars(callback).values()]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, type):
            if not _is_users_class(value):
                continue
            waiting.extend((*value.__bases__, *vars(value).values()))
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting.extend((value.fget, value.fset, value.fdel))
        elif type(value) is FunctionType and is_users(value.__globals__):
            if name := next(_names_beyond(value.__code__, value.__globals__), ""):
                return f"it uses {name}"
            waiting.extend(value.__globals__[name] for name in names_used(value.__code__) if name in value.__globals__)
            waiting.extend(cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell))
        elif _is_users_class(type(value)):
            waiting.append(type(value))
    return ""


def _names_beyond(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the names in a function that may reach beyond the process."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and str(instruction.argval).partition(".")[0] not in _HARMLESS:
            yield str(instruction.argval)
    for name in code.co_names:
        if name in namespace:
            if not _is_harmless(namespace[name]):
                yield name
        elif name in _FORBIDDEN and hasattr(builtins, name):
            yield name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_beyond(constant, namespace)


def _is_harmless(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _HARMLESS or is_users(vars(value))
    named = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    module = str(named.__module__)
    if module.partition(".")[0] in _HARMLESS:
        return True
    return module in sys.modules and is_users(vars(sys.modules[module]))


# --- learner fit


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
