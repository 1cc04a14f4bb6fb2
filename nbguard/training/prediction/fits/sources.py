"""Predictable fits by their types, found without importing any library."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from nbguard.errors import NbguardError, UnpredictableError, in_one_line
from nbguard.memory.core.advice import PREDICT_CELL
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.learners import is_learner
from nbguard.training.prediction.fits.batches import FULL, BatchShapes, sizes, trained_sizes
from nbguard.training.prediction.fits.copies import device_of, in_order_of_moving, state_of, tensors_of_models
from nbguard.training.prediction.fits.fit import ENDLESS, FitSource, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.fits.step_fit import StepSource

# --- A Trainer of Transformers', trained as its loop does it, as a copy without data.


@dataclass(kw_only=True)
class TrainerFit:
    """A copy of a Trainer with another loop."""

    trainer: Any  # the copy
    dtype: torch.dtype | None  # of mixed precision
    sizes: tuple[int, ...]
    shapes: tuple[Any, ...]  # of each batch
    held_out: tuple[Any, ...]  # of each batch of the evaluation
    items: int
    batches: int | None
    device: str = "cuda"
    has_optimizer: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def models(self) -> Iterable[Any]:
        """Return the copy of the model."""
        return (self.trainer.model,)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the model."""
        return in_order_of_moving(self.trainer.model)

    def change(self, code: str) -> None:
        """Run lines that change the Trainer `trainer`."""
        exec(code, {"trainer": self.trainer})  # noqa: S102 - our own lines, the same that are shown

    def run(self, make: MakeBatch) -> None:
        """Train some batches and evaluate."""
        trainer, args, model = self.trainer, self.trainer.args, self.trainer.model
        scaler = torch.amp.GradScaler("cuda") if self.dtype == torch.float16 else None
        trainer.accelerator.scaler = scaler
        if self.dtype is not None:
            _cast(model, self.dtype)
        trainer.create_optimizer()
        steps, loader = args.gradient_accumulation_steps, _on_device(self.shapes, make)
        meta = torch.device("meta")
        total = torch.zeros((), device=meta)
        for first in range(0, len(self.shapes), steps):
            number = min(steps, len(self.shapes) - first)
            samples, items = trainer.get_batch_samples(loader, number, meta)
            trainer.current_gradient_accumulation_steps = len(samples)
            for inputs in samples:
                loss = trainer.training_step(model, inputs, items)
                total += loss
            if scaler is not None:
                scaler.unscale_(trainer.optimizer)
            if args.max_grad_norm > 0:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # noqa: F841 - kept for the log
            if scaler is None:
                trainer.optimizer.step()
            else:
                scaler.step(trainer.optimizer)
                scaler.update()
            model.zero_grad()
        self._evaluate(make)

    def _evaluate(self, make: MakeBatch) -> None:
        trainer, model = self.trainer, self.trainer.model
        only_loss = trainer.args.prediction_loss_only or trainer.compute_metrics is None
        model.eval()
        gathered = []
        for inputs in _on_device(self.held_out, make):
            _, logits, labels = trainer.prediction_step(model, inputs, only_loss)
            gathered.append((logits, labels))


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """The fits of a Trainer."""

    trainer: Any  # the user's
    batch: BatchShapes  # to go by

    @classmethod
    def of(cls, trainer: Any, batch: Any) -> TrainerSource:
        """Return the fit of a Trainer with the shapes of `batch`, or of its data set's first items if that is None.

        Raises:
            UnpredictableError: no batch can be made, or an engine trains that has memory of its own.
        """
        args = trainer.args
        if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
            raise UnpredictableError("the Trainer uses DeepSpeed or FSDP, whose shards depend on the process group")
        if getattr(args, "torch_compile", False):
            raise UnpredictableError("the Trainer compiles its model, and torch.compile plans its own buffers")
        size = int(args.per_device_train_batch_size)
        if batch is None:
            batch = _first_batch(trainer, size)
        else:
            size = 0
        return cls(trainer, BatchShapes.of(batch, size or None))

    @property
    def size(self) -> int:
        """Return the items of a batch."""
        return self.batch.size

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return the model."""
        return (("trainer.model", self.trainer.model),)

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the tensors of the model and of the optimizer."""
        yield from tensors_of_models([self.trainer.model])
        if self.trainer.optimizer is not None:
            yield from state_of(self.trainer.optimizer)

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> TrainerFit:
        """Return a copy of the Trainer with a model without data."""
        trainer, args = self.trainer, self.trainer.args
        wanted = batch_size or self.size
        data = trainer.train_dataset
        count = len(data) if hasattr(data, "__len__") else FULL * wanted
        is_cut = full_only or bool(args.dataloader_drop_last)
        trained = trained_sizes(count, wanted, is_last_dropped=is_cut)
        steps = args.gradient_accumulation_steps
        trained = trained if steps == 1 else (wanted,) * (2 * steps)
        memo: dict[int, Any] = {}
        copier = FunctionCopier(memo, device_of([trainer.model]))
        own = copy.copy(trainer)
        memo[id(trainer)] = own
        own.model = own.model_wrapped = copier.copy(trainer.model)
        own.optimizer = copier.copy(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
        own.accelerator = copy.copy(trainer.accelerator)
        own.accelerator._optimizers = []
        own._prepare_input = _unchanged
        own.compute_loss_func = copier.copy(trainer.compute_loss_func)
        held_out: tuple[int, ...] = ()
        if trainer.eval_dataset is not None and str(args.eval_strategy) not in ("no", "IntervalStrategy.NO"):
            held_out = sizes(len(trainer.eval_dataset), int(args.per_device_eval_batch_size), is_last_dropped=False)
        callbacks = trainer.callback_handler.callbacks
        left_out = [type(each).__name__ for each in callbacks if not type(each).__module__.startswith("transformers.")]
        return TrainerFit(
            trainer=own,
            dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            sizes=trained,
            shapes=tuple(map(self.batch.cut, trained)),
            held_out=tuple(map(self.batch.cut, held_out)),
            items=count if hasattr(data, "__len__") else ENDLESS,
            batches=max(1, -(-count // wanted)) if hasattr(data, "__len__") else None,
            left_out=tuple(f"the callback {name} is not traced" for name in left_out),
        )


def _first_batch(trainer: Any, size: int) -> Any:
    """Return a batch of the first items of a Trainer's data set, of the columns that its model takes."""
    data = trainer.train_dataset
    if data is None or not hasattr(data, "__getitem__"):
        raise UnpredictableError(
            "the Trainer's data set has no items by index; give a batch, as in nbguard.predict(trainer, batch)"
        )
    with kept_generators():
        try:
            items = [data[place] for place in range(min(size, len(data)))]
            if trainer.args.remove_unused_columns and items and isinstance(items[0], dict):
                wanted = _columns(trainer)
                items = [{name: value for name, value in item.items() if name in wanted} for item in items]
            return copy.deepcopy(trainer.data_collator)(items)
        except Exception as error:  # noqa: BLE001 - whatever the user's data set raises is the reason
            reason = in_one_line(error)
    raise UnpredictableError(
        f"no batch could be made of the data set's first items ({reason}): give one, as in nbguard.predict(trainer, batch)"
    )


def _columns(trainer: Any) -> set[str]:
    """Return the names of the columns that a Trainer hands to its model."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    return {*inspect.signature(model.forward).parameters, "label", "label_ids", *trainer.label_names}


def _on_device(shapes: Iterable[Any], make: MakeBatch) -> Iterator[Any]:
    """Yield batches as the Trainer's loader does: it keeps the one that it has yielded until it has made the next."""
    for each in shapes:
        current_batch = make(each)
        yield current_batch


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Let a model compute in mixed precision and return float32, as the Trainer has it done (`Accelerator.prepare_model`)."""
    forward = torch.autocast("cuda", dtype)(type(model).forward if "forward" not in vars(model) else model.forward.__func__)

    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _float32(forward(self, *args, **kwargs))

    cast.__wrapped__ = forward  # type: ignore[attr-defined] # so that the signature is the model's
    model.forward = MethodType(cast, model)


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):  # a ModelOutput is made of its fields
        return type(value)({name: _float32(each) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(map(_float32, value))
    return value


def _unchanged(data: Any) -> Any:
    return data


# --- A Lightning module with automatic optimization, trained as Lightning's loop does it, as a copy without data.


_STATES = 4
"""Tensors of one number beside the last value of a logged name (`_ResultMetric` in lightning/pytorch/trainer/connectors)."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class LightningFit:
    """A copy of a module and the loop around it."""

    module: Any  # the copy
    precision: str
    sizes: tuple[int, ...]
    shapes: Any  # of each batch
    items: int = ENDLESS
    batches: int | None = None
    device: str = "cuda"
    has_optimizer: bool = True
    left_out: tuple[str, ...] = ()
    logged: dict[str, list[Any]] = field(default_factory=dict)  # by name: the memory that a logged value keeps

    @property
    def models(self) -> Iterable[Any]:
        """Return the copy of the module."""
        return (self.module,)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the module."""
        return in_order_of_moving(self.module)

    def change(self, code: str) -> None:
        """Run lines that change the module `model`."""
        exec(code, {"model": self.module})  # noqa: S102 - our own lines, the same that are shown

    def run(self, make: MakeBatch) -> None:
        """Train some batches; the optimizer calls forward and backward pass, as Lightning has it. Then validate one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is logged without a Trainer
            optimizer = _optimizer(self.module)
            self.module.log, self.module.log_dict = self._log, self._log_all
            scaler = torch.amp.GradScaler("cuda") if self.precision == "fp16" else None
            self.module.train()
            for number, _ in enumerate(self.sizes):
                batch = make(self.shapes)
                self._train(batch, number, optimizer, scaler)
            if _overrides(self.module, "validation_step"):
                self.module.eval()
                with torch.no_grad(), self._autocast():
                    self.module.validation_step(make(self.shapes), 0)

    def _train(self, batch: Any, number: int, optimizer: Any, scaler: Any) -> None:
        def closure() -> Any:
            with self._autocast():
                output = _loss(self.module.training_step(batch, number))  # is kept to the end of the step
                loss = output / 1  # by the number of batches that are added up
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss.detach()

        if scaler is None:
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Keep as much of a logged value as Lightning does on the device: states, defaults, the last value."""
        if name not in self.logged:
            self.logged[name] = [torch.zeros((), device="meta") for _ in range(_STATES)]
        self.logged[name][_STATES:] = [value.detach().clone() if isinstance(value, torch.Tensor) else value]

    def _log_all(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            self._log(name, value)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", _TYPES[self.precision]) if self.precision else nullcontext()


@dataclass(frozen=True, slots=True)
class LightningSource:
    """The fits of a Lightning module."""

    module: Any  # the user's
    batch: BatchShapes  # to go by
    precision: str  # "bf16", "fp16", or empty

    @classmethod
    def of(cls, module: Any, batch: Any, precision: str) -> LightningSource:
        """Return the fit of a module with the shapes of `batch`."""
        if not module.automatic_optimization:
            raise UnpredictableError(
                f"{type(module).__name__} optimizes by hand: give its step as a function, as in nbguard.predict(step, batch)"
            )
        return cls(module, BatchShapes.of(batch), precision)

    @property
    def size(self) -> int:
        """Return the items of a batch."""
        return self.batch.size

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return the module."""
        return (("model", self.module),)

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the tensors of the module."""
        return tensors_of_models([self.module])

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> LightningFit:  # noqa: ARG002 - all batches are full
        """Return a copy of the module, without its Trainer."""
        size = batch_size or self.size
        memo: dict[int, Any] = {}
        trainer = vars(self.module).get("_trainer")
        if trainer is not None:
            memo[id(trainer)] = None
        module = FunctionCopier(memo, device_of([self.module])).copy(self.module)
        return LightningFit(module=module, precision=self.precision, sizes=(size,) * FULL, shapes=self.batch.cut(size))


def _optimizer(module: Any) -> Any:
    """Return the one optimizer of a module: automatic optimization takes no more."""
    configured = module.configure_optimizers()
    if isinstance(configured, dict):
        configured = configured["optimizer"]
    while isinstance(configured, (tuple, list)) and configured:
        configured = configured[0]
    if not isinstance(configured, torch.optim.Optimizer):
        raise UnpredictableError(f"configure_optimizers() of {type(module).__name__} returns no optimizer of PyTorch's")
    return configured


def _loss(output: Any) -> Any:
    return output["loss"] if isinstance(output, dict) else output


def _overrides(module: Any, name: str) -> bool:
    """Say whether a module's class defines a method that Lightning's base has empty."""
    kind = next(kind for kind in type(module).__mro__ if name in vars(kind))
    return str(kind.__module__).partition(".")[0] not in ("lightning", "pytorch_lightning")


# --- Fits by their types.


_PRECISIONS = (None, "bf16", "fp16")
_LIGHTNING = ("lightning", "pytorch_lightning")
"""The packages of Lightning."""
_LIGHTNING_NEEDS = (
    "a Lightning module has no batches of its own; write "
    + PREDICT_CELL.code
    + " above the cell with trainer.fit(module, loader), or give a batch, as in nbguard.predict(module, next(iter(loader)))"
)


def source_of(fitted: Any, batch: Any, precision: str | None) -> FitSource:
    """Return the source of copies of a fit.

    Args:
        fitted: a Learner, Trainer, Lightning module or step function.
        batch: to go by; None where none was given.
        precision: "bf16", "fp16" or None.

    Raises:
        NbguardError: it is nothing that is fitted, or an argument does not go with it.
        UnpredictableError: no batch can be made.
    """
    if precision not in _PRECISIONS:
        raise NbguardError(f"precision is 'bf16' or 'fp16', not {precision!r:.40}")
    if is_learner(fitted):
        return LearnerSource.of(fitted, batch, precision or "")
    if is_of(fitted, "transformers", "Trainer"):
        if precision:
            raise NbguardError("a Trainer takes its precision from its TrainingArguments (bf16=True or fp16=True)")
        return TrainerSource.of(fitted, batch)
    is_lightnings = any(is_of(fitted, package, "LightningModule") for package in _LIGHTNING)
    if (is_lightnings and batch is None) or any(is_of(fitted, package, "Trainer") for package in _LIGHTNING):
        raise UnpredictableError(_LIGHTNING_NEEDS)
    if not is_lightnings and (not callable(fitted) or isinstance(fitted, type) or hasattr(fitted, "named_modules")):
        raise NbguardError(
            "predict takes a fastai Learner, a Trainer of Transformers', a Lightning module, or a training step as a function "
            f"of a batch, not {type(fitted).__name__}"
        )
    if batch is None:
        raise UnpredictableError("a step function needs a batch, as in nbguard.predict(step, batch)")
    if is_lightnings:
        return LightningSource.of(fitted, batch, precision or "")
    if precision:
        raise NbguardError("a step function sets its own precision with torch.autocast")
    return StepSource.of(fitted, batch)


def is_of(value: Any, package: str, name: str) -> bool:
    """Say whether an object is of a class of that name from a package, by its classes' modules."""
    return any(kind.__name__ == name and str(kind.__module__).partition(".")[0] == package for kind in type(value).__mro__)
