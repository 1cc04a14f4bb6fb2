"""Outputs of a model besides tensors and plain data, which no exported program can return."""

from __future__ import annotations

import dis
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.training.doctor.analysis.export import ExportFailure
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.export.failures import failure_in

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
