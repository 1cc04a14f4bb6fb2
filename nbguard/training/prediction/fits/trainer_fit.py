"""A Trainer of Transformers', trained as its loop does it, as a copy without data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.training.prediction.fits.batches import FULL, BatchShapes, sizes, trained_sizes
from nbguard.training.prediction.fits.copies import device_of, in_order_of_moving, state_of, tensors_of_models
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier


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
