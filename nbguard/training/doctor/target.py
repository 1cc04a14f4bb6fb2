"""PyTorch, imported for a diagnosis in a shell."""

from __future__ import annotations

import contextlib
import importlib

from nbguard.training.doctor.analysis.variable_checks import variable_checks
from nbguard.training.doctor.environment import environment_facts


def import_torch() -> None:
    """Import PyTorch if it is installed; not where the checks name a setting that aborts the process at its import."""
    checks = variable_checks(environment_facts())
    if any(finding.severity == "problem" for check in checks for finding in check.findings):
        return
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torch")
