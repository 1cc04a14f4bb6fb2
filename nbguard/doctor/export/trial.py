"""A model's export, tried in every way that is there: on copies, values compared, the user's model untouched."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nbguard.doctor.analysis.export import ExportAttempt, ExportFacts, ExportFailure, ValueDifference
from nbguard.doctor.analysis.repairs import repair_of
from nbguard.doctor.determinism.batch import TrialBatch
from nbguard.doctor.determinism.digest import tensors_in
from nbguard.doctor.determinism.kept_state import KeptState
from nbguard.doctor.export.draft import drafted_failures
from nbguard.doctor.export.failures import failure_of
from nbguard.doctor.export.model_copy import shared_copy
from nbguard.doctor.export.onnx import onnx_attempt
from nbguard.doctor.export.surroundings import pickled_by_name, preprocessing
from nbguard.doctor.export.write_watch import own_if_written
from nbguard.doctor.subject import TrialSubject
from nbguard.errors import UndiagnosableError
from nbguard.scan.devices.generators import LibraryGenerators

_CALLS = 5
"""Calls for a latency, of which the least counts."""
_REPAIRS = 10
"""Failures that are cured one after the other to find the next."""
_TRACE = "torch.__trace"
"""The logger by which PyTorch's draft of an export collects its failures."""
_LEAST = 2
"""Items of the batch that is exported: a batch of one counts as a size that never changes."""


def exported(subject: TrialSubject, batch: TrialBatch) -> ExportFacts:
    """Return what came of trying to export a model.

    Raises:
        UndiagnosableError: the model cannot be copied or called.
    """
    generators = LibraryGenerators()
    state = KeptState([("model", subject.model)], [*subject.model.parameters(), *subject.model.buffers()])
    try:
        with _quiet(), torch.no_grad():
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
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        raise UndiagnosableError(f"{subject.name} cannot be called: {reason}") from error
    static, program = _program("torch.export", subject, batch, {})
    dynamic, dynamic_program = _program("dynamic batch", subject, batch, {"dynamic_shapes": _dynamic(batch)})
    strict, _ = _program("strict", subject, batch, {"strict": True})
    attempts = (static, dynamic, strict, _traced(subject, batch), onnx_attempt(dynamic_program or program, batch))
    notes = [f"{left_out} hooks that are functions were left out of the copy that was exported"] if left_out else []
    if subject is not given:
        notes.append("a call of the model writes into its parameters: it was tried on a copy with memory of its own")
    return ExportFacts(
        attempts=attempts,
        eager=eager,
        items=batch.items or 0,
        preprocessing=preprocessing(subject),
        unpicklable=pickled_by_name(subject),
        notes=tuple(notes),
    )


def _program(name: str, subject: TrialSubject, batch: TrialBatch, options: dict[str, Any]) -> tuple[ExportAttempt, Any]:
    """Return an attempt with `torch.export`, with all failures that can be found, and the program if it passes."""
    started = time.perf_counter()
    failures: list[ExportFailure] = []
    replaced: dict[str, str] = {}
    program: Any = None
    while len(failures) < _REPAIRS:
        model = _copy_with(subject, replaced)
        try:
            program = torch.export.export(model, batch.inputs, batch.named_inputs, **{"strict": False, **options})
            break
        except Exception as error:  # noqa: BLE001 - an exporter raises what it likes
            failure = failure_of(error, model)
        repair = repair_of(failure.module_class)
        if repair is None or not repair.replacement or failure.module in replaced:
            drafted = drafted_failures(_copy_with(subject, replaced), batch) if name == "torch.export" else []
            failures += drafted or [failure]
            break
        failures.append(failure)
        replaced[failure.module] = repair.replacement
    attempt = ExportAttempt(
        name=name, passes=not failures, seconds=time.perf_counter() - started, failures=tuple(dict.fromkeys(failures))
    )
    if failures:
        return attempt, None
    sizes = (batch.items,) if name != "dynamic batch" else (batch.items, (batch.items or 1) + 1, 1)
    return _compared(attempt, subject, batch, program.module(), [size for size in sizes if size]), program


def _copy_with(subject: TrialSubject, replaced: dict[str, str]) -> nn.Module:
    """Return a fresh copy of a model, with modules of torch.nn's in place of some."""
    model, _ = shared_copy(subject.model)
    for path, kind in replaced.items():
        set_module(model, path, getattr(nn, kind)())
    return model


def _dynamic(batch: TrialBatch) -> Any:
    """Return which dimension of each input may change: the first, where it is the batch's."""
    automatic = torch.export.Dim.DYNAMIC

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {0: automatic} if value.dim() and value.shape[0] == batch.items else None
        if isinstance(value, (tuple, list)):
            return type(value)(map(spec, value))
        if isinstance(value, dict):
            return {key: spec(part) for key, part in value.items()}
        return None

    if batch.named_inputs is not None:
        return {key: spec(part) for key, part in batch.named_inputs.items()}
    return tuple(map(spec, batch.inputs))


def _traced(subject: TrialSubject, batch: TrialBatch) -> ExportAttempt:
    """Return an attempt with TorchScript's tracer, whose warnings name branches that are fixed in the trace."""
    started = time.perf_counter()
    if batch.named_inputs is not None:
        return ExportAttempt(name="TorchScript", passes=False, reason="the tracer takes no inputs by keyword")
    model, _ = shared_copy(subject.model)
    try:
        traced = torch.jit.trace(model, batch.inputs, check_trace=False, strict=False)
        attempt = ExportAttempt(name="TorchScript", passes=True, seconds=time.perf_counter() - started)
        return _compared(attempt, subject, batch, traced, [batch.items or 1, (batch.items or 1) + 1, 1])
    except Exception as error:  # noqa: BLE001 - an exporter raises what it likes
        return ExportAttempt(
            name="TorchScript", passes=False, seconds=time.perf_counter() - started, failures=(failure_of(error, model),)
        )


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
                error=type(error).__name__, message=f"a batch of {size} is refused: {str(error).partition(chr(10))[0][:120]}"
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


def difference(items: int, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> ValueDifference:
    """Return the largest difference of two lists of outputs."""
    largest, scale = 0.0, 0.0
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in theirs]:
        return ValueDifference(items=items, largest=float("inf"), relative=float("inf"))
    for one, other in zip(mine, theirs, strict=True):
        if not one.numel():
            continue
        exact, close = (tensor.detach().double().cpu() for tensor in (plain(one), plain(other)))
        gap = (exact - close).abs()
        largest = max(largest, float(gap[~(exact.isnan() & close.isnan())].max()) if gap.numel() else 0.0)
        scale = max(scale, float(exact.nan_to_num().abs().max()))
    return ValueDifference(items=items, largest=largest, relative=largest / scale if scale else largest)


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
    """Return a batch of plain tensors: an exported program must not know fastai's classes."""
    return batch.each(lambda tensor: plain(tensor).detach().clone())


def plain(tensor: Any) -> torch.Tensor:
    """Return a tensor of a subclass as one of PyTorch's own, without a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        own: torch.Tensor = tensor.as_subclass(torch.Tensor)
        return own


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace a part of a model by another module."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what exporters print, log and warn of to themselves."""
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
