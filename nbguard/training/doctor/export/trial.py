"""Trials of a model's export in every way that PyTorch has, on copies, with values compared."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import inspect
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.libraries import ExportRepair
from nbguard.memory.scan.devices.generators import LibraryGenerators
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.progress import stage
from nbguard.training.doctor.analysis.export import EAGER, CallTimes, ExportAttempt, ExportFacts, ExportFailure, ValueDifference
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import tensors_in
from nbguard.training.doctor.determinism.kept_state import KeptState
from nbguard.training.doctor.export.copies import apply_repair, shared_copy
from nbguard.training.doctor.export.failures import difference, failure_in, failure_of, own_if_written, plain
from nbguard.training.doctor.export.frozen import drafted_failures, tracer_warnings, with_frozen
from nbguard.training.doctor.export.surroundings import batch_changes, inputs_of, pickled_by_name, preprocessing
from nbguard.training.doctor.subject import TrialSubject
from nbguard.units import GiB

# --- Conversion to ONNX in a separate process, bounded in time and memory, so that a dying converter does no harm


_SECONDS = 180
_BYTES = 16 * GiB
"""Of the converter's address space; PyTorch alone takes some of it."""

_CONVERTER = """
import json, resource, sys, time, warnings
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), int(sys.argv[3])))
warnings.filterwarnings("ignore")
import torch
program = torch.export.load(sys.argv[1])
converted = torch.onnx.export(program, dynamo=True, verbose=False)
result = {"size": len(converted.model_proto.SerializeToString())}
try:
    import onnxruntime
except ImportError:
    result["unverified"] = "onnxruntime is not installed: values were not compared"
else:
    from torch.onnx.verification import verify_onnx_program
    checked = verify_onnx_program(converted)
    result["largest"] = max((each.max_abs_diff for each in checked), default=0.0)
    args, named = program.example_inputs
    outputs = torch.utils._pytree.tree_leaves(program.module()(*args, **named))
    scale = max((float(each.abs().max()) for each in outputs if isinstance(each, torch.Tensor) and each.numel()), default=0.0)
    result["relative"] = result["largest"] / scale if scale else result["largest"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(sys.argv[4])
    given = [each for each in torch.utils._pytree.tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
    try:
        session = onnxruntime.InferenceSession(converted.model_proto.SerializeToString(), options, ["CPUExecutionProvider"])
        feed = {one.name: tensor.numpy() for one, tensor in zip(session.get_inputs(), given, strict=True)}
        times, ends = [], time.perf_counter_ns() + int(sys.argv[5])
        session.run(None, feed)
        while len(times) < 5 or (len(times) < 200 and time.perf_counter_ns() < ends):
            start = time.perf_counter_ns()
            session.run(None, feed)
            times.append(time.perf_counter_ns() - start)
        result["times"] = times
    except Exception:  # above 2 GiB, or without some of the inputs, it is not timed
        pass
json.dump(result, open(sys.argv[2], "w"))
"""


def onnx_attempt(program: Any, batch: TrialBatch, failures: tuple[ExportFailure, ...], budget: int) -> ExportAttempt:
    """Return an attempt to convert an exported program, which is in host memory afterwards.

    It is not tried without the packages. Without a program it fails where the export did: `failures`. Calls are timed on the
    CPU for a fifth of `budget`, in nanoseconds, with as many threads as PyTorch has.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} not installed: pip install onnx onnxscript onnxruntime"
        return ExportAttempt(name="ONNX", passes=False, reason=reason)
    if program is None:
        return ExportAttempt(name="ONNX", passes=False, failures=failures)
    try:
        program = _on_the_host(program)
    except ImportError:
        reason = "this PyTorch cannot move an exported program to the CPU for conversion"
        return ExportAttempt(name="ONNX", passes=False, reason=reason)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nbguard-onnx-") as folder:
        saved, answer = Path(folder, "program.pt2"), Path(folder, "answer.json")
        limits = map(str, (_BYTES, torch.get_num_threads(), budget // 5))
        own = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder}  # onnxruntime leaves a file in the folder for temporary ones
        try:
            torch.export.save(program, saved)
            run = subprocess.run(  # noqa: S603 - this Python, a program of ours
                [sys.executable, "-c", _CONVERTER, str(saved), str(answer), *limits],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _failed(started, "TimeoutExpired", f"the conversion took longer than {_SECONDS} s")
        except Exception as error:  # noqa: BLE001 - a program that cannot be saved
            return _failed(started, type(error).__name__, str(error).partition("\n")[0])
        if run.returncode or not answer.exists():
            lines = [line for line in run.stderr.splitlines() if line.strip()] or [f"the converter ended with {run.returncode}"]
            kind, _, message = next((line for line in reversed(lines) if "Error" in line), lines[-1]).partition(":")
            return _failed(started, kind.rpartition(".")[2], message.strip() or kind)
        result = json.loads(answer.read_text())
    differences: tuple[ValueDifference, ...] = ()
    if "largest" in result:
        differences = (ValueDifference(items=batch.items or 0, largest=result["largest"], relative=result["relative"]),)
    times = CallTimes.of(result["times"]) if "times" in result else None
    seconds = time.perf_counter() - started
    return ExportAttempt(name="ONNX", passes=True, seconds=seconds, differences=differences, times=times)


def _on_the_host(program: Any) -> Any:
    """Return a program with its tensors in host memory: the converter's process sees no GPU.

    Raises ImportError where PyTorch is too old to move one.
    """
    if all(tensor.is_cpu for tensor in (*program.state_dict.values(), *tensors_in(program.example_inputs))):
        return program
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, "cpu")


def _failed(started: float, kind: str, message: str) -> ExportAttempt:
    failure = ExportFailure(error=kind, message=message[:220])
    return ExportAttempt(name="ONNX", passes=False, seconds=time.perf_counter() - started, failures=(failure,))


# --- Outputs of a model besides tensors and plain data, which no exported program can return.


_PLAIN = (int, float, bool, str, complex, type(None), torch.Tensor, torch.dtype, torch.device)


def unknown_output(model: nn.Module, batch: TrialBatch) -> ExportFailure | None:
    """Return the innermost module that makes an object which the model returns and no exported program can.

    The model is a copy and is called once. None if it returns tensors and plain data only.
    """
    returned: list[tuple[nn.Module, type]] = []
    handles = [
        module.register_forward_hook(lambda one, _, output: returned.extend((one, kind) for kind in _unknown(output)))
        for module in model.modules()
    ]
    try:
        kinds = _unknown(model(*batch.inputs, **(batch.named_inputs or {})))
    except Exception:  # noqa: BLE001 - the user's own model
        return None
    finally:
        for handle in handles:
            handle.remove()
    if not kinds:
        return None
    module = next(module for module, kind in returned if kind is kinds[0])
    kind = kinds[0]
    return failure_in(model, module, _line(module, kind), output=f"{kind.__module__}.{name_of(kind)}")


def _unknown(output: Any) -> list[type]:
    """Return the classes in an output that are neither containers that PyTorch knows, nor tensors, nor plain data."""
    return [type(leaf) for leaf in pytree.tree_leaves(output) if not set(_PLAIN) & set(mro_of(type(leaf)))]


def _line(module: nn.Module, kind: type) -> tuple[str, int, str]:
    """Return the line of a forward pass that names a class; else its first line."""
    code = inspect.unwrap(type(module).forward).__code__
    number = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        number = getattr(instruction, "line_number", instruction.starts_line) or number  # from Python 3.13 on by that name
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == kind.__name__:
            return code.co_filename, int(number), code.co_name
    return code.co_filename, code.co_firstlineno, code.co_name


_CALLS = (5, 200)
"""Calls for the times of one way to call a model, at least and at most."""
_QUICKLY = 200_000_000
"""Nanoseconds for timing all ways together, where no limit was given."""
_REPAIRS = 10
"""Failures that are cured one after the other to find the next."""
_TRACE = "torch.__trace"
"""The logger that PyTorch's draft of an export collects its failures with."""
_LEAST = 2
"""Items of the batch that is exported: a batch of one counts as a size that never changes."""


def exported(subject: TrialSubject, batch: TrialBatch, budget: int = _QUICKLY) -> ExportFacts:
    """Return the outcome of trying to export a model, whose calls are then timed for `budget` nanoseconds.

    Raises:
        UndiagnosableError: the model cannot be copied or called.
    """
    with untouched(subject):
        return _exported(subject, exportable(batch), budget)


def exported_statically(subject: TrialSubject, batch: TrialBatch) -> ExportAttempt:
    """Return the outcome of `torch.export` alone, for a batch of one size.

    Raises:
        UndiagnosableError: the model cannot be copied.
    """
    with untouched(subject):
        batch = exportable(batch)
        return _program("torch.export", own_if_written(subject, batch), batch, {}, {}, drafts=True)[0]


@contextlib.contextmanager
def untouched(subject: TrialSubject) -> Iterator[None]:
    """Put everything back that trials change, and hold back the messages of exporters."""
    generators = LibraryGenerators()
    state = KeptState([("model", subject.model)], [*subject.model.parameters(), *subject.model.buffers()])
    try:
        with _quiet(), torch.no_grad(), _left_globals_removed(), _left_variables_removed():
            yield
    finally:
        state.restore()
        generators.restore()


@contextlib.contextmanager
def _left_variables_removed() -> Iterator[None]:
    """Put the variables of the environment back that PyTorch's compiler sets for itself, as the folder of its cache."""

    def own() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(("TORCH", "TRITON"))}

    before = own()
    try:
        yield
    finally:
        for name in own().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _left_globals_removed() -> Iterator[None]:
    """Take away the programs that strict exports leave in PyTorch's globals; those that were there before stay.

    PyTorch 2.13 keeps each of them, with the model's parameters.
    """

    def space() -> dict[str, Any]:
        module = sys.modules.get("torch._dynamo.functional_export")
        return {} if module is None else vars(module)

    before = set(space())
    try:
        yield
    finally:
        for name in [name for name in space() if name.startswith("__compiled_fn_") and name not in before]:
            del space()[name]


def _exported(given: TrialSubject, batch: TrialBatch, budget: int) -> ExportFacts:
    subject = own_if_written(given, batch)
    model, left_out = shared_copy(subject.model)
    calls: dict[str, Callable[..., Any]] = {EAGER: model}
    try:
        model(*batch.inputs, **(batch.named_inputs or {}))
    except Exception as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"{subject.name} cannot be called: {reason}") from error
    stage("trying torch.export")
    static, program = _program("torch.export", subject, batch, {}, calls, drafts=True)
    stage("trying torch.export with batches of any size")
    dynamic, dynamic_program = _of_any_batch(subject, batch, calls)
    stage("trying torch.export, strict")
    strict, _ = _program("strict", subject, batch, {"strict": True}, calls)
    stage("trying ONNX")
    onnx = onnx_attempt(dynamic_program or program, batch, static.failures, budget)
    scripts = _traced(subject, batch, calls), _scripted(subject, batch, calls)
    stage("timing calls of each")
    times = _times(calls, batch, budget)
    attempts = tuple(
        replace(each, times=times.get(each.name, each.times)) for each in (static, dynamic, strict, *scripts, onnx)
    )
    notes = [f"{left_out} hooks that are functions are not part of the exported copy"] if left_out else []
    if subject.is_compiled:
        notes.append("the export is of the model before torch.compile")
    if subject is not given:
        notes.append("a call of the model writes into its parameters, so it was tried on a copy with separate memory")
    steps, prepares = preprocessing(subject)
    return ExportFacts(
        attempts=attempts,
        eager=times[EAGER],
        items=batch.items or 0,
        is_learner=subject.learn is not None,
        preprocessing=steps,
        prepares=prepares,
        inputs=inputs_of(batch),
        changes=batch_changes(subject),
        unpicklable=pickled_by_name(subject),
        notes=tuple(notes),
    )


def _program(
    name: str,
    subject: TrialSubject,
    batch: TrialBatch,
    options: dict[str, Any],
    calls: dict[str, Callable[..., Any]],
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
        calls: gets the program if it passes, to be called.
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
    calls[name] = program.module()
    return _compared(attempt, subject, batch, calls[name], [size for size in sizes if size]), program


def _of_any_batch(subject: TrialSubject, batch: TrialBatch, calls: dict[str, Callable[..., Any]]) -> tuple[ExportAttempt, Any]:
    """Return an attempt where the batch may have any size, each input by itself or else all of them the same."""
    attempt = partial(_program, "dynamic batch", subject, batch, calls=calls, of_any_batch=True)
    shared = {"dynamic_shapes": _dynamic(subject.model, batch, torch.export.Dim("batch", min=1))}
    alone = getattr(torch.export.Dim, "DYNAMIC", None)
    if alone is None:  # PyTorch 2.4
        return attempt(shared)
    shapes = _dynamic(subject.model, batch, alone)
    each = attempt({"dynamic_shapes": shapes})
    if each[0].passes or not any("Constraints violated" in failure.message for failure in each[0].failures):
        return each
    same = attempt(shared)
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


def _traced(subject: TrialSubject, batch: TrialBatch, calls: dict[str, Callable[..., Any]]) -> ExportAttempt:
    """Return an attempt with TorchScript's tracer, which fixes the branches that the batch takes."""
    inputs = {"example_inputs": batch.inputs} if batch.named_inputs is None else {"example_kwarg_inputs": batch.named_inputs}
    warned: list[tuple[str, int]] = []

    def make(model: nn.Module) -> Any:
        with tracer_warnings(warned):
            return torch.jit.trace(model, **inputs, check_trace=False, strict=False)

    diagnose = partial(with_frozen, subject=subject, batch=batch, warned=warned)
    return _torchscript("jit.trace", subject, batch, make, calls, diagnose)


def _scripted(subject: TrialSubject, batch: TrialBatch, calls: dict[str, Callable[..., Any]]) -> ExportAttempt:
    """Return an attempt with TorchScript's compiler, which knows a part of Python."""
    with _forgetting_classes():
        return _torchscript("jit.script", subject, batch, torch.jit.script, calls)


def _torchscript(
    name: str,
    subject: TrialSubject,
    batch: TrialBatch,
    make: Callable[[nn.Module], Any],
    calls: dict[str, Callable[..., Any]],
    diagnose: Callable[..., ExportAttempt] | None = None,
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
    calls[name] = made
    return attempt if diagnose is None else diagnose(attempt, made=made)


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
    for size in sizes if repeats(subject, batch) else ():
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
    return replace(attempt, differences=tuple(differences))


def repeats(subject: TrialSubject, batch: TrialBatch) -> bool:
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


def _times(calls: dict[str, Callable[..., Any]], batch: TrialBatch, budget: int) -> dict[str, CallTimes]:
    """Return the time of each way to call a model. They take turns, so that a slower machine slows all of them.

    A way that fails the batch is left out. The first calls, while TorchScript compiles, are not counted.
    """
    named, times = batch.named_inputs or {}, {name: list[int]() for name in calls}
    least, most = _CALLS
    started = time.perf_counter_ns()
    for number in range(-2, most):
        if number >= least and time.perf_counter_ns() - started > budget:
            break
        for name in list(times):
            start = time.perf_counter_ns()
            try:
                calls[name](*batch.inputs, **named)
            except Exception:  # noqa: BLE001 - an exported model raises what it likes; the attempt tells of it
                del times[name]
                continue
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if number >= 0:
                times[name].append(time.perf_counter_ns() - start)
    return {name: CallTimes.of(each) for name, each in times.items()}


def exportable(batch: TrialBatch) -> TrialBatch:
    """Return a batch of two items at least, of plain tensors, as an exported program must not know a library's classes."""
    whole = batch.each(lambda tensor: plain(tensor).detach().clone())
    return whole.resized(max(whole.items or _LEAST, _LEAST))


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
