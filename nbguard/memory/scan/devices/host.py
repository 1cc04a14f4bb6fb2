"""The host as this process may use it, its memory by container and limits, CPU cores, and CUDA's libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbguard.memory.core.oom_facts import HostFacts

# --- The versions of CUDA's libraries that PyTorch was built with and has loaded, read without initialising a device.


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryVersions:
    """The versions in a build of PyTorch; the driver's own version is read by `NvmlReader.driver`."""

    cuda: str = ""  # torch.version.cuda: it was built for this CUDA; empty for none
    hip: str = ""  # likewise for ROCm
    cudnn_built: tuple[int, ...] | None = None  # version that it was built with; None without one
    cudnn_loaded: tuple[int, ...] | None = None  # version that it has loaded
    nccl: tuple[int, ...] | None = None  # None without one


def library_versions(torch: Any) -> LibraryVersions:
    """Return the versions of a PyTorch that is imported."""
    build = torch._C
    cudnn: Any = getattr(build, "_cudnn", None)
    return LibraryVersions(
        cuda=torch.version.cuda or "",
        hip=getattr(torch.version, "hip", None) or "",
        cudnn_built=reading(lambda: tuple(cudnn.getCompileVersion()), None),
        cudnn_loaded=reading(lambda: tuple(cudnn.getRuntimeVersion()), None),
        nccl=reading(lambda: _nccl(build._nccl_version()), None),
    )


def reading(read: Callable[[], _Value], otherwise: _Value) -> _Value:
    """Return a reading, or `otherwise` where this build of PyTorch does not have it."""
    try:
        return read()
    except (AttributeError, RuntimeError, TypeError):
        return otherwise


def dotted(version: tuple[int, ...] | None) -> str:
    """Return a version as it is written; empty for none."""
    return ".".join(map(str, version or ()))


def _nccl(version: Any) -> tuple[int, ...]:
    """Return NCCL's version, which PyTorch packs into one number, 16 bits each: the rule of `torch.cuda.nccl.version`."""
    return version >> 32, version >> 16 & 0xFFFF, version & 0xFFFF


# --- The CPU cores that this process may use.


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


_UNLIMITED = 1 << 60
"""Least number that a cgroup of version 1 writes for no limit."""
_SHM = "dev/shm"
_VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of each version of cgroups: where it is mounted, the files of limit and usage, the cache among it that can be dropped."""


def host_facts(root: Path = Path("/")) -> HostFacts:
    """Return the host's memory; a field is None where the system does not tell. `root` is another place for /proc and /sys."""
    total, available = _machine(root)
    groups = list(_groups(root))
    group_limit, group_room = min(groups, key=lambda group: group[1], default=(None, None))
    address_limit, address_room = _address_space(root)
    shm_total, shm_free = _shared(root / _SHM)
    return HostFacts(
        total=total,
        available=available,
        group_limit=group_limit,
        group_room=group_room,
        address_limit=address_limit,
        address_room=address_room,
        shm_total=shm_total,
        shm_free=shm_free,
    )


def _machine(root: Path) -> tuple[int | None, int | None]:
    """Return (total, available) of the machine: the kernel's own figures, elsewhere psutil's, if it is there."""
    lines = _read(root / "proc/meminfo").splitlines()
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    if "MemAvailable" in fields:
        return fields.get("MemTotal"), fields["MemAvailable"]
    try:
        import psutil  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None, None
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes left) for each cgroup with a limit that this process is in.

    In a container the path may be the host's, which does not exist here: then the container's own is mounted here.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_file, usage_file, cache = _VERSIONS[1 if controllers else 0]
        base = root / mount
        place = base / path.strip("/")
        while True:
            limit, usage = _number(place / limit_file), _number(place / usage_file)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                stat = dict(pair.split(maxsplit=1) for pair in _read(place / "memory.stat").splitlines() if " " in pair)
                yield limit, max(0, limit - usage + int(stat.get(cache, 0)))
            if place == base:
                break
            place = place.parent


def _address_space(root: Path) -> tuple[int | None, int | None]:
    """Return (limit, bytes left) of the address space, if it is limited."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None, None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None, None
    return limit, max(0, limit - int(pages[0]) * resource.getpagesize())


def _shared(folder: Path) -> tuple[int | None, int | None]:
    try:
        file_system = os.statvfs(folder)
    except (OSError, AttributeError):  # no such folder; not a Unix
        return None, None
    return file_system.f_blocks * file_system.f_frsize, file_system.f_bavail * file_system.f_frsize


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
