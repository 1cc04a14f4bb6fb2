"""`%nbguard doctor` and `%nbguard fix`: a Learner or a model by its name, and what to check or to fix."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.errors import UndiagnosableError
from nbguard.frontend.arguments import add_diagnosis

if TYPE_CHECKING:
    from nbguard.frontend.notebook.session import Session
    from nbguard.training.doctor.analysis.diagnosis import Diagnosis
    from nbguard.training.doctor.analysis.export import RepairedModel
    from nbguard.training.doctor.analysis.step_trace import Deterministic, Mode, StepTimes
    from nbguard.training.doctor.subject import TrialSubject
    from nbguard.training.profiler.analysis.nonfinite import NanRepair


def add_doctor(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard doctor`."""
    options.add_argument("name", nargs="?", metavar="LEARN", help="a Learner or a model (default: only check the environment)")
    options.add_argument("--batch", metavar="NAME", help="a batch to try, as the training loader yields it")
    options.add_argument("--loss", metavar="NAME", help="the loss function of a model without a Learner")
    add_diagnosis(options)


def diagnosed(shell: Any, options: argparse.Namespace) -> Diagnosis:
    """Return the diagnosis that a line asks for.

    Raises:
        NbguardError: a name does not exist, or stands for nothing that can be tried.
    """
    from nbguard.training.doctor.analysis.diagnosis import chosen
    from nbguard.training.doctor.diagnose import diagnose
    from nbguard.training.doctor.launch import diagnose_launch

    if options.ranks or options.self_test:
        return diagnose_launch(self_test=options.self_test)
    learn, batch, loss = (named(shell, name) for name in (options.name, options.batch, options.loss))
    cells, name = shell.user_ns.get("In", ()), options.name or "learn"
    asked = chosen(options.topics, options.golden, options.max_latency)
    return diagnose(learn, batch, loss_func=loss, cells=cells, name=name, batch_name=options.batch or "", **asked)


def add_fix(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard fix`."""
    options.add_argument(
        "fault",
        choices=["determinism", "export", "nan"],
        metavar="determinism|export|nan",
        help="the fault to put right",
    )
    options.add_argument(
        "name",
        nargs="?",
        metavar="LEARN",
        help="a Learner whose loaders to seed, whose model to export, or whose NaN to find",
    )
    options.add_argument(
        "--batch",
        metavar="NAME",
        help=(
            "with nan: a batch that failed (default: the batch of the last profile's NaN); with export: a "
            "batch for a model without a loader"
        ),
    )
    options.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of all generators (0)")
    options.add_argument("--warn-only", action="store_true", help="allow operations without a deterministic implementation")
    options.add_argument("--undo", action="store_true", help="restore all settings")


def fixed(shell: Any, session: Session, options: argparse.Namespace) -> Deterministic | RepairedModel | NanRepair:
    """Carry out a line.

    Raises:
        NbguardError: it cannot be done; the message says why.
    """
    if options.batch is not None and options.fault == "determinism":
        raise UndiagnosableError("--batch works with nan and export, as in   %nbguard fix nan learn --batch xb")
    if options.fault == "nan":
        return _nan_repaired(shell, options, named(shell, options.name), named(shell, options.batch))
    return _repaired(shell, options) if options.fault == "export" else _determined(shell, session, options)


def _repaired(shell: Any, options: argparse.Namespace) -> RepairedModel:
    """Put a copy of a model that exports into the variable of `-o`, and return the replacements in it."""
    if options.name is None:
        raise UndiagnosableError("name the Learner or model to repair, as in  %nbguard fix export learn -o exportable")
    learn, batch = named(shell, options.name), named(shell, options.batch)
    from nbguard.training.doctor.analysis.export import RepairedModel
    from nbguard.training.doctor.export.repair import repaired
    from nbguard.training.doctor.subject import subject_of

    model, replaced = repaired(subject_of(learn, batch))
    target, options.output = options.output or "exportable", None
    shell.user_ns[target] = model
    return RepairedModel(name=target, replaced=replaced)


def _determined(shell: Any, session: Session, options: argparse.Namespace) -> Deterministic:
    """Set the switches that make a run repeat, or put it back; with a Learner's name, measure the slow-down first.

    An earlier fix is undone before that, so that steps without it are compared with steps in its mode.
    """
    from nbguard.training.doctor.deterministic import deterministic, refuse_unsettable
    from nbguard.training.doctor.subject import subject_of

    if options.undo:
        if session.deterministic is None:
            raise UndiagnosableError("there is nothing to undo; `%nbguard fix determinism` was not run")
        state = session.deterministic.undo()
        session.deterministic = None
        return state
    learn = named(shell, options.name)
    refuse_unsettable(options.seed)
    subject = None if learn is None else subject_of(learn)
    if session.deterministic is not None:
        session.deterministic.undo()
        session.deterministic = None
    times = None if subject is None else _times(subject, "warn only" if options.warn_only else "on")
    session.deterministic = deterministic(options.seed, learn, warn_only=options.warn_only)
    return session.deterministic.state.timed(times)


def _times(subject: TrialSubject, mode: Mode) -> StepTimes | None:
    """Return how long a step takes, without and in a deterministic mode; None if none can be run."""
    from nbguard.training.doctor.determinism.batch import trial_batch
    from nbguard.training.doctor.determinism.trial import step_times
    from nbguard.training.doctor.fit_device import on_fit_device

    try:
        with on_fit_device(subject):
            return step_times(subject, trial_batch(subject), mode)
    except UndiagnosableError:
        return None


def _nan_repaired(shell: Any, options: argparse.Namespace, learn: Any, batch: Any) -> NanRepair:
    """Return the cure of the last NaN; with `-o`, put a cured copy of the model into that variable.

    `learn` and `batch` are the objects that the line names, or None.

    Raises:
        NbguardError: no NaN was met, or it cannot be tried; the message says why and what to do.
    """
    from nbguard.training.doctor.subject import subject_of
    from nbguard.training.profiler.nonfinite.origin import finite_copy, last_model, nan_repair

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
    from nbguard.training.profiler.nonfinite.origin import origin_on, repair_of

    with on_fit_device(subject), autocast_of(subject)():
        batch = trial_batch(subject)
        origin = origin_on(subject.model, batch.inputs, batch.named_inputs or {})
    return repair_of(origin, f"The model makes a value of `{options.batch}` that is not finite", options.name)


def _name_of(shell: Any, model: Any) -> str:
    """Return the name of a Learner that has this model, or else of the model itself; empty where it has none."""
    if model is None:
        return ""
    from nbguard.memory.scan.heap.kinds import attribute_of
    from nbguard.memory.scan.learners import is_learner

    names = [name for name in list(shell.user_ns) if type(name) is str and name.isidentifier() and not name.startswith("_")]
    learners = [
        name for name in names if is_learner(shell.user_ns[name]) and attribute_of(shell.user_ns[name], "model") is model
    ]
    return next(iter([*learners, *(name for name in names if shell.user_ns[name] is model)]), "")


def named(shell: Any, name: str | None) -> Any:
    """Return the object of a name or an expression such as `runs[0]` in the notebook; None for no name.

    Raises:
        NbguardError: it does not exist, or could only be found by running the user's code.
    """
    if name is None:
        return None
    from nbguard.memory.scan.targets import is_computed, lookup, parse_target

    value = lookup(parse_target(name), shell.user_ns)
    if is_computed(value):
        raise UndiagnosableError(f"{name} is computed by the user's code: give it a name first, as in  learn = {name}")
    return value
