"""A Lightning module with automatic optimization, trained as Lightning's loop does it, as a copy without data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.batches import FULL, BatchShapes
from nbguard.training.prediction.fits.copies import device_of, in_order_of_moving, tensors_of_models
from nbguard.training.prediction.fits.fit import ENDLESS, MakeBatch
from nbguard.training.prediction.fits.functions import FunctionCopier

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
