"""Trials of a model's export in every way that PyTorch has, on copies, with values compared."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.libraries import ExportRepair
from nbguard.memory.scan.devices.generators import LibraryGenerators
from nbguard.memory.scan.progress import stage
from nbguard.training.doctor.analysis.export import ExportAttempt, ExportFacts, ExportFailure
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digest import tensors_in
from nbguard.training.doctor.determinism.kept_state import KeptState
from nbguard.training.doctor.export.apply_repair import apply_repair
from nbguard.training.doctor.export.callbacks import batch_changes
from nbguard.training.doctor.export.difference import difference, plain
from nbguard.training.doctor.export.draft import drafted_failures
from nbguard.training.doctor.export.failures import failure_of
from nbguard.training.doctor.export.frozen import tracer_warnings, with_frozen
from nbguard.training.doctor.export.left_globals import left_globals_removed
from nbguard.training.doctor.export.model_copy import shared_copy
from nbguard.training.doctor.export.onnx import onnx_attempt
from nbguard.training.doctor.export.outputs import unknown_output
from nbguard.training.doctor.export.surroundings import pickled_by_name, preprocessing
from nbguard.training.doctor.export.write_watch import own_if_written
from nbguard.training.doctor.subject import TrialSubject

_CALLS = 5
"""Calls for a latency, which is the least of their times."""
_REPAIRS = 10
"""Failures that are cured one after the other to find the next."""
_TRACE = "torch.__trace"
"""The logger that PyTorch's draft of an export collects its failures with."""
_LEAST = 2
"""Items of the batch that is exported: a batch of one counts as a size that never changes."""


def exported(subject: TrialSubject, batch: TrialBatch) -> ExportFacts:
    """Return the result of each attempt to export a model.

    Raises:
        UndiagnosableError: the model cannot be copied or called.
    """
    generators = LibraryGenerators()
    state = KeptState([("model", subject.model)], [*subject.model.parameters(), *subject.model.buffers()])
    try:
        with _quiet(), torch.no_grad(), left_globals_removed():
            return _exported(subject, _plain(batch))
    finally:
        state.restore()
        generators.restore()


def _exported(given: TrialSubject, batch: TrialBatch) -> ExportFacts:
    batch = batch.resized(max(batch.items or _LEAST, _LEAST))
    subject = own_if_written(given, batch)
    model, left_out = shared_copy(subject.model)
    try:
        eager = _latency(lambda: model(*batch.inputs, **(batch.named_inputs or {})))
    except Exception as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"{subject.name} cannot be called: {reason}") from error
    stage("trying torch.export")
    static, program = _program("torch.export", subject, batch, {}, drafts=True)
    stage("trying torch.export with batches of any size")
    dynamic, dynamic_program = _of_any_batch(subject, batch)
    stage("trying torch.export, strict")
    strict, _ = _program("strict", subject, batch, {"strict": True})
    stage("trying ONNX")
    onnx = onnx_attempt(dynamic_program or program, batch, static.failures)
    attempts = (static, dynamic, strict, _traced(subject, batch), _scripted(subject, batch), onnx)
    notes = [f"{left_out} hooks that are functions are not part of the exported copy"] if left_out else []
    if subject.is_compiled:
        notes.append("the export is of the model before torch.compile")
    if subject is not given:
        notes.append("a call of the model writes into its parameters, so it was tried on a copy with separate memory")
    return ExportFacts(
        attempts=attempts,
        eager=eager,
        items=batch.items or 0,
        is_learner=subject.learn is not None,
        preprocessing=preprocessing(subject),
        changes=batch_changes(subject),
        unpicklable=pickled_by_name(subject),
        notes=tuple(notes),
    )


def _program(
    name: str,
    subject: TrialSubject,
    batch: TrialBatch,
    options: dict[str, Any],
    *,
    drafts: bool = False,
    of_any_batch: bool = False,
) -> tuple[ExportAttempt, Any]:
    """Return an attempt with `torch.export`, with all failures that can be found, and the program if it passes.

    Args:
        name: of the attempt.
        subject: the exported model.
        batch: the inputs that are traced.
        options: of `torch.export.export`.
        drafts: also look with PyTorch's draft export for failures that no module can be blamed for.
        of_any_batch: compare the program's outputs with batches of other sizes, too.
    """
    started = time.perf_counter()
    failures: list[ExportFailure] = []
    cured: dict[str, ExportRepair] = {}
    program: Any = None
    while len(failures) < _REPAIRS:
        model = _copy_with(subject, cured)
        try:
            program = torch.export.export(model, batch.inputs, batch.named_inputs, **{"strict": False, **options})
            break
        except Exception as error:  # noqa: BLE001 - an exporter raises what it likes
            failure = failure_of(error, model)
        if not failure.module:
            failure = _located(failure, _copy_with(subject, cured), batch, options)
        repair = failure.repair
        if repair is None or not (repair.replacement or repair.setting) or failure.module in cured:
            drafted = drafted_failures(_copy_with(subject, cured), batch) if drafts else []
            failures += drafted or [failure]
            break
        failures.append(failure)
        cured[failure.module] = repair
    attempt = ExportAttempt(
        name=name, passes=not failures, seconds=time.perf_counter() - started, failures=tuple(dict.fromkeys(failures))
    )
    if failures:
        return attempt, None
    sizes = (batch.items, (batch.items or 1) + 1, 1) if of_any_batch else (batch.items,)
    return _compared(attempt, subject, batch, program.module(), [size for size in sizes if size]), program


def _of_any_batch(subject: TrialSubject, batch: TrialBatch) -> tuple[ExportAttempt, Any]:
    """Return an attempt that allows any batch size, of each input by itself, or else all of them the same."""
    shapes = _dynamic(subject.model, batch, torch.export.Dim.DYNAMIC)
    each = _program("dynamic batch", subject, batch, {"dynamic_shapes": shapes}, of_any_batch=True)
    if each[0].passes or not any("Constraints violated" in failure.message for failure in each[0].failures):
        return each
    shared = _dynamic(subject.model, batch, torch.export.Dim("batch", min=1))
    same = _program("dynamic batch", subject, batch, {"dynamic_shapes": shared}, of_any_batch=True)
    if same[0].passes:
        return same
    lines = drafted_failures(_copy_with(subject, {}), batch, shapes)
    return (replace(each[0], failures=tuple(dict.fromkeys(lines))), None) if lines else each


def _located(failure: ExportFailure, model: nn.Module, batch: TrialBatch, options: dict[str, Any]) -> ExportFailure:
    """Return a failure whose traceback names no module with the one that is the reason.

    That is a module whose return values cannot be exported; else the one that a strict export names, which follows the code.
    """
    returned = unknown_output(model, batch)
    if returned is not None:
        return replace(returned, error=failure.error, message=failure.message)
    try:
        torch.export.export(model, batch.inputs, batch.named_inputs, **{**options, "strict": True})
    except Exception as error:  # noqa: BLE001 - an exporter raises what it likes
        strict = failure_of(error, model)
        if strict.module and strict.line:
            return replace(strict, error=failure.error, message=failure.message)
    return failure


def _copy_with(subject: TrialSubject, cured: dict[str, ExportRepair]) -> nn.Module:
    """Return a fresh copy of a model, with the cures of some failures, each by the path of its module."""
    model, _ = shared_copy(subject.model)
    for path, repair in cured.items():
        apply_repair(model, path, repair)
    return model


def _dynamic(model: nn.Module, batch: TrialBatch, size: Any) -> dict[str, Any]:
    """Return by argument which dimension of each input may change, and how: the first, where it is the batch's."""

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {0: size} if value.dim() and value.shape[0] == batch.items else None
        if isinstance(value, (tuple, list)):
            return type(value)(map(spec, value))
        if isinstance(value, dict):
            return {key: spec(part) for key, part in value.items()}
        return None

    arguments = inspect.signature(model.forward).bind(*batch.inputs, **(batch.named_inputs or {})).arguments
    return {name: spec(value) for name, value in arguments.items()}


def _traced(subject: TrialSubject, batch: TrialBatch) -> ExportAttempt:
    """Return an attempt with TorchScript's tracer, which fixes the branches that the batch takes."""
    inputs = {"example_inputs": batch.inputs} if batch.named_inputs is None else {"example_kwarg_inputs": batch.named_inputs}
    warned: list[tuple[str, int]] = []

    def make(model: nn.Module) -> Any:
        with tracer_warnings(warned):
            return torch.jit.trace(model, **inputs, check_trace=False, strict=False)

    return _torchscript("jit.trace", subject, batch, make, partial(with_frozen, subject=subject, batch=batch, warned=warned))


def _scripted(subject: TrialSubject, batch: TrialBatch) -> ExportAttempt:
    """Return an attempt with TorchScript's compiler, which knows a part of Python."""
    with _forgetting_classes():
        return _torchscript("jit.script", subject, batch, torch.jit.script)


def _torchscript(
    name: str,
    subject: TrialSubject,
    batch: TrialBatch,
    make: Callable[[nn.Module], Any],
    judge: Callable[..., ExportAttempt] | None = None,
) -> ExportAttempt:
    started = time.perf_counter()
    model, _ = shared_copy(subject.model)
    try:
        made = make(model)
        attempt = ExportAttempt(name=name, passes=True, seconds=time.perf_counter() - started)
        attempt = _compared(attempt, subject, batch, made, [batch.items or 1, (batch.items or 1) + 1, 1])
    except Exception as error:  # noqa: BLE001 - an exporter raises what it likes
        failure = failure_of(error, model)
        return ExportAttempt(name=name, passes=False, seconds=time.perf_counter() - started, failures=(failure,))
    return attempt if judge is None else judge(attempt, made=made)


@contextlib.contextmanager
def _forgetting_classes() -> Iterator[None]:
    """Remove the class types that TorchScript cached during the attempt, which would keep the notebook's classes for good."""
    store: Any = getattr(torch.jit._recursive, "concrete_type_store", None)
    known = set(getattr(store, "type_store", ()))
    try:
        yield
    finally:
        for kind in set(getattr(store, "type_store", ())) - known:
            store.methods_compiled -= set(store.type_store.pop(kind))


def _compared(attempt: ExportAttempt, subject: TrialSubject, batch: TrialBatch, call: Any, sizes: list[int]) -> ExportAttempt:
    """Return an attempt with its values against those of the eager model, each for batches of some sizes."""
    differences = []
    for size in sizes if _repeats(subject, batch) else ():
        other = batch if size == batch.items else batch.resized(size)
        named = other.named_inputs or {}
        mine = _eager(subject, other)
        if mine is None:
            continue
        try:
            theirs = list(tensors_in(call(*other.inputs, **named)))
        except Exception as error:  # noqa: BLE001 - an exported model raises what it likes
            failure = ExportFailure(
                error=type(error).__name__,
                message=f"a batch of {size} is refused: {str(error).partition(chr(10))[0][:120]}",
                refused=size,
            )
            return replace(attempt, passes=False, failures=(failure,))
        differences.append(difference(size, mine, theirs))
    latency = _latency(lambda: call(*batch.inputs, **(batch.named_inputs or {})))
    return replace(attempt, differences=tuple(differences), latency=latency)


def _repeats(subject: TrialSubject, batch: TrialBatch) -> bool:
    """Say whether two calls of a model give the same: of one that draws random numbers no values can be compared."""
    model, _ = shared_copy(subject.model)
    one, other = (list(tensors_in(model(*batch.inputs, **(batch.named_inputs or {})))) for _ in range(2))
    return all(torch.equal(plain(mine), plain(theirs)) for mine, theirs in zip(one, other, strict=True))


def _eager(subject: TrialSubject, batch: TrialBatch) -> list[torch.Tensor] | None:
    """Return the outputs of a fresh copy of the model; None if it takes no batch of this size: there is nothing to compare."""
    model, _ = shared_copy(subject.model)
    try:
        return list(tensors_in(model(*batch.inputs, **(batch.named_inputs or {}))))
    except Exception:  # noqa: BLE001 - the user's own model
        return None


def _latency(call: Callable[[], Any]) -> int:
    """Return the nanoseconds of the quickest of some calls."""
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter_ns()
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def _plain(batch: TrialBatch) -> TrialBatch:
    """Return a batch of plain tensors: an exported program must not know a library's classes."""
    return batch.each(lambda tensor: plain(tensor).detach().clone())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the prints, logs and warnings of exporters."""
    named = logging.root.manager.loggerDict
    loggers = [
        logger
        for name, logger in named.items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger) and name != _TRACE
    ]
    handlers = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.handlers, logger.propagate = [logging.NullHandler()], False
            yield
    finally:
        for logger, before, propagates in handlers:
            logger.handlers, logger.propagate = before, propagates
