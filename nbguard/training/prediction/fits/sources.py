"""Predictable fits by their types, found without importing any library."""

from __future__ import annotations

from typing import Any

from nbguard.errors import NbguardError, UnpredictableError
from nbguard.memory.core.advice import PREDICT_CELL
from nbguard.memory.scan.learners import is_learner
from nbguard.training.prediction.fits.fit import FitSource
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.fits.lightning_fit import LightningSource
from nbguard.training.prediction.fits.step_fit import StepSource
from nbguard.training.prediction.fits.trainer_fit import TrainerSource

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
