"""PyTorch, and the subject of `nbguard doctor MODULE:NAME`: a Learner, or a model with a batch, that a script makes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

from nbguard.doctor.analysis.variable_checks import variable_checks
from nbguard.doctor.environment import environment_facts
from nbguard.errors import UndiagnosableError, in_one_line


def import_torch() -> None:
    """Import PyTorch if it is installed; not where the checks name a setting with which its import aborts the process."""
    checks = variable_checks(environment_facts())
    if any(finding.severity == "problem" for check in checks for finding in check.findings):
        return
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torch")


def made_by(target: str) -> tuple[Any, Any]:
    """Return (Learner or model, batch or None) that `module:name` stands for; a function is called without arguments.

    Raises:
        UndiagnosableError: there is no such module or name, or what it raised when it was run.
    """
    name, _, attribute = target.partition(":")
    if not attribute:
        raise UndiagnosableError(
            f"{target} is not a target: name a module and what it makes, as in  nbguard doctor train:learn"
        )
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        made = getattr(importlib.import_module(name.removesuffix(".py")), attribute)
        if isinstance(made, types.FunctionType):
            made = made()
    except (Exception, SystemExit) as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"{target} cannot be made: {reason}") from error
    return made if type(made) is tuple and len(made) == 2 else (made, None)
