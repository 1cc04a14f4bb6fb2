"""`nbguard.diagnose`: does it repeat, does it export, is this machine right. Reads the settings of a Learner or a model."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbguard.errors import UndiagnosableError
from nbguard.memory.core import advice
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.progress import stage
from nbguard.training.doctor.analysis.diagnosis import Check, Diagnosis, EnvironmentFacts, not_checked, variable_checks
from nbguard.training.doctor.analysis.export import OF_A_MODEL, export_checks, no_export
from nbguard.training.doctor.analysis.gpu_checks import gpu_checks, machine_checks, toolkit_checks
from nbguard.training.doctor.analysis.seed_checks import (
    LearnerFacts,
    LoaderSettings,
    PrecisionFacts,
    learner_checks,
    seed_checks,
)
from nbguard.training.doctor.analysis.step_trace import no_step, step_checks
from nbguard.training.doctor.environment import environment_facts, toolkit_facts
from nbguard.training.doctor.subject import TrialSubject, fit_device, subject_of
from nbguard.training.runs.analysis.cell_seeds import seeds_in
from nbguard.units import parse_time

# --- The settings of a Learner or a model, read from its attributes.


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


def diagnose(  # noqa: PLR0913 - a public function with keywords
    learn: Any = None,
    batch: Any = None,
    *,
    loss_func: Any = None,
    optimizer: Any = None,
    cells: Sequence[str] | None = None,
    name: str = "learn",
    batch_name: str = "",
    determinism: bool = True,
    export: bool = True,
    environment: bool = True,
    golden: str | Path | None = None,
    max_latency: str | float | None = None,
) -> Diagnosis:
    """Return whether this machine is set up for a fit, whether its steps repeat bit by bit, and whether its model exports.

    A step is tried on copies of the parameters and buffers: the model, its optimizer, gradients, statistics and hooks, the
    loaders and all generators of random numbers are afterwards as they were.

    Args:
        learn: a fastai Learner or a torch module; if None, only checks that need neither are made.
        batch: a batch as the training loader yields it, inputs first; if None, one is taken from the Learner's training set.
        loss_func: of a model that is no Learner's; if None, the sum of its outputs stands for the loss.
        optimizer: of a model that is no Learner's; if None, no step is made.
        cells: sources of the cells of a notebook, in the order of their runs, or None outside of a notebook.
        name: of `learn` in the notebook, for commands.
        batch_name: of `batch`, likewise.
        determinism: whether to try whether a step repeats: some ten steps are run.
        export: whether to try to export the model: seconds, and the first time some more for PyTorch's compiler.
        environment: whether to check the machine, the libraries and the settings.
        golden: a file with a batch and the outputs of the model for it. The exports are tried with this batch, and the outputs
            compared with the model's own. A file that is not there is written.
        max_latency: the limit for the p95 of a call of an exported model, as "20ms" or in seconds.

    Raises:
        NbguardError: an argument cannot be used; nothing has been changed.
    """
    started = time.perf_counter()
    limit = None if max_latency is None else _nanoseconds(max_latency)
    subject = None if learn is None else subject_of(learn, batch, loss_func, optimizer)
    if subject is None and (golden is not None or limit is not None):
        raise UndiagnosableError(OF_A_MODEL)
    checks: list[Check] = []
    notes: list[str] = []
    has_gpu = None
    if environment:
        stage("looking at this machine")
        facts = environment_facts()
        has_gpu = bool(facts.driver.gpus)
        checks += _environment(subject, facts)
    if determinism:
        stage("trying whether a step repeats")
        made, left_out = _determinism(subject, cells, name)
        checks += made
        notes += left_out
    if export:
        stage("trying whether the model exports")
        made, left_out = _export(subject, name, batch_name, golden, limit)
        checks += made
        notes += left_out
        gc.collect()  # exporters leave cycles that lead to the parameters: a report would show them as the user's
    return Diagnosis(
        subject="" if subject is None else subject.name,
        checks=tuple(checks),
        has_gpu=has_gpu,
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


def _environment(subject: TrialSubject | None, facts: EnvironmentFacts) -> tuple[Check, ...]:
    settings = None if subject is None else learner_facts(subject)
    # A user who asks about a Learner trains with the installed packages, and compiles nothing.
    toolkit = toolkit_checks(replace(facts, toolkit=toolkit_facts())) if subject is None else ()
    return (
        *gpu_checks(facts),
        *machine_checks(facts),
        *toolkit,
        *variable_checks(facts),
        *learner_checks(settings, facts),
    )


_NOTHING = "no Learner or model was given: " + advice.NAME_ONE


def _determinism(
    subject: TrialSubject | None, cells: Sequence[str] | None, name: str
) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Return the checks of determinism, and the parts they left out."""
    if subject is None:
        return (not_checked("determinism", "one step", _NOTHING),), ()
    from nbguard.training.doctor.determinism.batch import trial_batch
    from nbguard.training.doctor.determinism.seeds import loader_seeds, switch_states
    from nbguard.training.doctor.determinism.trial import tried
    from nbguard.training.doctor.fit_device import on_fit_device

    seeds = seed_checks(loader_seeds(subject), switch_states(subject), None if cells is None else seeds_in(cells), name)
    try:
        with on_fit_device(subject):
            facts = tried(subject, trial_batch(subject))
    except UndiagnosableError as error:
        return (*no_step(str(error)), *seeds), ()
    return (*step_checks(facts, name), *seeds), facts.notes


def _export(
    subject: TrialSubject | None, name: str, batch_name: str, golden: str | Path | None, limit: int | None
) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Return the checks of export, and the things that they left out."""
    if subject is None:
        return no_export(_NOTHING), ()
    from nbguard.training.doctor.determinism.batch import trial_batch
    from nbguard.training.doctor.export.golden import golden_facts, golden_of
    from nbguard.training.doctor.export.trial import exported
    from nbguard.training.doctor.fit_device import on_fit_device

    kept = None if golden is None else golden_of(golden)
    try:
        with on_fit_device(subject):
            batch = trial_batch(subject) if kept is None else kept.batch_of(subject.model)
            facts = exported(subject, batch, *() if limit is None else (_WELL,))
            compared = None if golden is None else golden_facts(subject, batch, golden, kept)
    except UndiagnosableError as error:
        return no_export(str(error), limit=limit, golden=str(golden or "")), ()
    given = batch_name or ("batch" if subject.batch is not None else "")
    return export_checks(facts, name, given, limit=limit, golden=compared), facts.notes


_WELL = 5_000_000_000
"""Nanoseconds spent on timing calls that a limit was given for."""


def _nanoseconds(limit: str | float) -> int:
    """Return a limit in nanoseconds.

    Raises:
        UndiagnosableError: it is no time above zero.
    """
    try:
        given = parse_time(limit) if isinstance(limit, str) else round(limit * 1e9)
        if given > 0:
            return given
    except (ValueError, TypeError, OverflowError):
        pass
    raise UndiagnosableError(f"{limit!r} is not a time: write it as 20ms, or give seconds")
