"""Conversion to ONNX in a separate process, bounded in time and memory, so that a dying converter does no harm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nbguard.training.doctor.analysis.export import ExportAttempt, ExportFailure, ValueDifference
from nbguard.training.doctor.analysis.serving import CallTimes
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import tensors_in
from nbguard.units import GiB

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
