"""The code that runs in an engine, which scans its own memory and answers with plain data for any version on the other side."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from nbguard.errors import NbguardError
from nbguard.training.ranks.errors import error_words


def memory_facts() -> dict[str, Any]:
    """Return the facts of `frontend.cluster.analysis.engines`: this engine's process, devices, stale bytes and last error.

    Raises:
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    report = api.report()
    devices = [
        {
            "device": device.device,
            "name": device.name,
            "uuid": _uuid(device.device) if device.kernel else "",
            "allocated": device.allocated,
            "reserved": None if device.total is None else sum(pool.space.reserved for pool in device.pools),
            "holder": device.holders[0].label if device.holders else "",
            "held": device.holders[0].retained if device.holders else 0,
        }
        for device in report.devices
    ]
    error = getattr(sys, "last_value", None)
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": devices,
        "stale": report.stale,
        "error": error_words(error) if isinstance(error, BaseException) and not isinstance(error, NbguardError) else "",
    }


def plan_facts(targets: tuple[str, ...], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a cleanup of this engine, as plain data; nothing is touched.

    Raises:
        TargetError: a target cannot be freed here.
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    plan = api.plan(*targets, **choices)
    steps = [action.future for action in plan.actions if action.nbytes != 0 or action.kind != "collect"]
    return {"promised": plan.promised, "steps": [*steps, *plan.skipped]}


def release_facts(targets: tuple[str, ...], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Clean this engine up, and return the outcome as plain data.

    Raises:
        TargetError: a target cannot be freed here; nothing was touched.
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    outcome = api.release(*targets, **choices)
    steps = [action.label for action in outcome.done if action.nbytes != 0 or action.kind != "collect"]
    undone = [f"{label}: {reason}" for label, reason in outcome.undone]
    return {
        "promised": outcome.plan.promised,
        "freed": outcome.realised + outcome.extra,
        "left": outcome.after,
        "steps": [*steps, *undone, *outcome.plan.skipped],
    }


def _uuid(device: str) -> str:
    """Return the number that a GPU, or a slice of one, has in the whole world; empty where PyTorch tells none."""
    torch: Any = sys.modules["torch"]
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        return ""
    return str(getattr(torch.cuda.get_device_properties(int(index)), "uuid", ""))
