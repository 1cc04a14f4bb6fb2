"""The settings of a Learner or a model, read from its attributes."""

from __future__ import annotations

import sys
from typing import Any

from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.training.doctor.analysis.learner_checks import LearnerFacts, LoaderSettings, PrecisionFacts
from nbguard.training.doctor.subject import TrialSubject, fit_device

_NAMES = ("the training loader", "the validation loader")


def learner_facts(subject: TrialSubject, batch_bytes: int | None = None) -> LearnerFacts:
    """Return the settings of a subject. `batch_bytes`: of a batch, where one has been made."""
    torch: Any = sys.modules["torch"]
    parameters = list(subject.model.parameters())
    device = fit_device(subject)
    kinds = [parameter.device.type for parameter in parameters] if device is None else [device.type]
    return LearnerFacts(
        loaders=_loaders(subject, batch_bytes),
        precision=_precision(torch, subject, parameters),
        is_on_device=any(kind not in ("cpu", "meta") for kind in kinds),
    )


def _loaders(subject: TrialSubject, batch_bytes: int | None) -> tuple[LoaderSettings, ...]:
    loaders = attribute_of(attribute_of(subject.learn, "dls"), "loaders") if subject.learn is not None else [subject.loader]
    known = [loader for loader in loaders or () if loader is not None]
    return tuple(_loader(loader, name, batch_bytes) for loader, name in zip(known, _NAMES, strict=False))


def _loader(loader: Any, name: str, batch_bytes: int | None) -> LoaderSettings:
    """Return the settings of fastai's loader, whose workers are its stand-in's, or of torch's."""
    inner = attribute_of(loader, "fake_l") or loader
    workers, prefetch = attribute_of(inner, "num_workers"), attribute_of(inner, "prefetch_factor")
    return LoaderSettings(
        name=name,
        workers=workers if type(workers) is int else 0,
        prefetch=prefetch if type(prefetch) is int else 2,
        pins=attribute_of(inner, "pin_memory") is True,
        batch=batch_bytes,
    )


def _precision(torch: Any, subject: TrialSubject, parameters: list[Any]) -> PrecisionFacts:
    half = sum(parameter.dtype is torch.float16 for parameter in parameters)
    scaler, interval, is_enabled = _scaler(subject.learn)
    return PrecisionFacts(
        scaler=scaler,
        growth_interval=interval,
        is_scaling=is_enabled,
        half_parameters=half,
        eps=_eps(subject.optimizer),
    )


def _scaler(learn: Any) -> tuple[str, int | None, bool]:
    """Return (class, growth interval, whether it scales) of fastai's gradient scaler, also of one that a fit will make."""
    scaler = attribute_of(learn, "scaler")
    if scaler is not None:
        interval = attribute_of(scaler, "_growth_interval")
        return type(scaler).__name__, interval if type(interval) is int else None, attribute_of(scaler, "_enabled") is True
    for callback in (attribute_of(learn, "cbs") if learn is not None else None) or ():
        if type(callback).__name__ == "MixedPrecision":
            settings = attribute_of(callback, "kwargs") or {}
            is_fp16 = getattr(attribute_of(callback, "amp_mode"), "value", "") == "fp16"
            return "GradScaler" if is_fp16 else "", settings.get("growth_interval", 2000), is_fp16
    return "", None, False


def _eps(optimizer: Any) -> tuple[float, ...]:
    """Return the eps of the groups of torch's optimizer or fastai's."""
    inner = attribute_of(optimizer, "opt") or optimizer
    groups = attribute_of(inner, "param_groups") or attribute_of(inner, "hypers") or ()
    values = (dict(group).get("eps") for group in groups)
    return tuple(float(value) for value in values if value is not None)
