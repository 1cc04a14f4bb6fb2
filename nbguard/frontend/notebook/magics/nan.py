"""`%nbguard fix nan`: the layer that made a NaN, by the last profile or on a batch, and a cured copy."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from nbguard.errors import UndiagnosableError
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.learners import is_learner
from nbguard.training.profiler.analysis.nonfinite import NanRepair


def nan_repaired(shell: Any, options: argparse.Namespace, learn: Any, batch: Any) -> NanRepair:
    """Return the cure of the last NaN; with `-o`, put a cured copy of the model into that variable.

    `learn` and `batch` are the objects that the line names, or None.

    Raises:
        NbguardError: no NaN was met, or it cannot be tried; the message says why and what to do.
    """
    from nbguard.training.doctor.subject import subject_of
    from nbguard.training.profiler.nonfinite.loss_history import finite_copy, last_model, nan_repair

    subject = None if learn is None else subject_of(learn)
    model = last_model() if subject is None else subject.model
    if batch is not None:
        if subject is None:
            raise UndiagnosableError("name the Learner or model to try, as in  %nbguard fix nan learn --batch xb")
        repair = _on_batch(subject_of(learn, batch=batch), options)
    else:
        repair = nan_repair(None if subject is None else model, options.name or _name_of(shell, model))
    if options.output and repair.layers:
        if model is None:
            raise UndiagnosableError("the model is gone: name the one to copy, as in  %nbguard fix nan learn -o finite")
        target, options.output = options.output, None
        shell.user_ns[target] = finite_copy(model, repair.layers)
        return replace(repair, copy=target)
    if not repair.layers:
        options.output = None  # the variable is for a model, not for this answer
    return repair


def _on_batch(subject: Any, options: argparse.Namespace) -> NanRepair:
    """Return the repair of the layer that makes a NaN of a batch."""
    from nbguard.training.doctor.determinism.batch import trial_batch
    from nbguard.training.doctor.determinism.step import autocast_of
    from nbguard.training.doctor.fit_device import on_fit_device
    from nbguard.training.profiler.nonfinite.loss_history import origin_on, repair_of

    with on_fit_device(subject), autocast_of(subject)():
        batch = trial_batch(subject)
        origin = origin_on(subject.model, batch.inputs, batch.named_inputs or {})
    return repair_of(origin, f"The model makes a value of `{options.batch}` that is not finite", options.name)


def _name_of(shell: Any, model: Any) -> str:
    """Return the name of a Learner that has this model, or else of the model itself; empty where it has none."""
    if model is None:
        return ""
    names = [name for name in list(shell.user_ns) if type(name) is str and name.isidentifier() and not name.startswith("_")]
    learners = [
        name for name in names if is_learner(shell.user_ns[name]) and attribute_of(shell.user_ns[name], "model") is model
    ]
    return next(iter([*learners, *(name for name in names if shell.user_ns[name] is model)]), "")
