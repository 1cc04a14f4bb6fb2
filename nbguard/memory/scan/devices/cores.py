"""The CPU cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the CPU cores that this process may use: by its affinity and the quota of its control group."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in (_quota(_CGROUP / "cpu.max"), _old_quota(_CGROUP / "cpu")) if quota is not None]
    return max(1, min([affinity, *(round(quota) for quota in quotas)]))


def _quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def _old_quota(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
