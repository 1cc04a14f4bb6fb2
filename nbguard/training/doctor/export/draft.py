"""All failures of an export in one go, since PyTorch's draft of an export goes on where an export would end.

It also knows the line at which a size that may change was taken for a number, which the error of an export does not tell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbguard.training.doctor.analysis.export import ExportFailure
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.export.failures import failure_at

_KINDS = ("DATA_DEPENDENT_ERROR", "MISSING_FAKE_KERNEL")
_FIXED_SIZE = re.compile(r"Eq\(\w+, (\d+)\)")
"""The guard of a line that holds for one size only."""


def drafted_failures(model: nn.Module, batch: TrialBatch, shapes: Any = None) -> list[ExportFailure]:
    """Return the failures that a draft finds, or none where it fails itself, or where this PyTorch has none.

    Args:
        model: a copy of the user's model.
        batch: its arguments.
        shapes: which dimensions may change, as `torch.export.export` takes them; None if none may.
    """
    try:
        from torch._logging.structured import INTERN_TABLE
        from torch.export import draft_export
    except ImportError:
        return []
    try:
        with _trace_files_removed():
            report = draft_export(model, batch.inputs, batch.named_inputs, dynamic_shapes=shapes)._report
    except Exception:  # noqa: BLE001 - the export's own error is what there is to say then
        return []
    files = {number: file for file, number in dict(INTERN_TABLE).items()}
    failures = []
    for each in report.failures:
        kind = getattr(each.failure_type, "name", str(each.failure_type))
        guard = _FIXED_SIZE.fullmatch(str(each.data.get("expr", ""))) if kind == "GUARD_ADDED" else None
        if guard is None and kind not in _KINDS:
            continue
        if guard is None:
            message = f"depends on the value of {each.data.get('expr', each.data.get('op', ''))}"
        else:
            kind, message = "Constraints violated", f"the line holds only for a size of {guard[1]}"
        frames = [
            (files.get(frame["filename"], ""), frame["line"], frame["name"]) for frame in each.data.get("user_stack") or ()
        ]
        failures.append(failure_at(kind, message, frames, model))
    return failures


@contextlib.contextmanager
def _trace_files_removed() -> Iterator[None]:
    """Have the files of a draft written into a folder that goes with its end."""
    from torch._logging import _internal

    name = getattr(_internal, "DTRACE_ENV_VAR", "TORCH_DTRACE")
    before, handlers = os.environ.get(name), set(map(id, _handlers()))
    with tempfile.TemporaryDirectory(prefix="nbguard-draft-") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
            for handler in _handlers():
                if id(handler) not in handlers and type(handler).__module__.startswith("torch"):
                    handler.close()


def _handlers() -> list[Any]:
    """Return all handlers of logging that are alive."""
    return [handler for reference in list(logging._handlerList) if (handler := reference()) is not None]  # type: ignore[attr-defined]
