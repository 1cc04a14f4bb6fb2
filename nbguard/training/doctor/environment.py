"""The environment, read without importing, initialising or asking anything that is not there already."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbguard.memory.scan.devices.host import host_facts, library_versions, reading, usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.libraries import has_shared_state
from nbguard.training.doctor.analysis.environment import (
    PREFIXES,
    WATCHED,
    DriverFacts,
    EnvironmentFacts,
    GpuFact,
    ProcessLimits,
    TorchFacts,
)
from nbguard.training.doctor.cuda_start import cuda_line

_LIBRARIES = ("libcudnn", "libnccl", "libcublas")
_OPENMP = ("libiomp5", "libomp")
"""Intel's and LLVM's OpenMP runtimes, which must not meet in a process."""


def environment_facts(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> EnvironmentFacts:
    """Return the facts of tier 0. `root` is another place for /proc, /sys and /dev."""
    torch: Any = sys.modules.get("torch")
    mapped = _mapped(root)
    return EnvironmentFacts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=None if torch is None else _torch_facts(torch),
        driver=_driver_facts(root),
        host=host_facts(root),
        limits=_limits(root),
        cores=usable_cores(),
        variables=tuple(sorted((name, value) for name, value in variables.items() if name.startswith(PREFIXES))),
        modules=frozenset(name for name in WATCHED if name in sys.modules),
        libraries=tuple((name, path) for name, path in mapped if name in _LIBRARIES),
        openmp=tuple(path for name, path in mapped if name.partition("-")[0] in _OPENMP),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        has_driver_open=_has_driver_open(root),
        has_accelerator_state=has_shared_state(),
        cuda_line=cuda_line(),
    )


def _torch_facts(torch: Any) -> TorchFacts:
    """Return PyTorch's build and switches; no device is asked."""
    build, flags = library_versions(torch), reading(lambda: torch._C._cuda_getArchFlags(), "") or ""
    return TorchFacts(
        version=str(torch.__version__),
        cuda=build.cuda,
        hip=build.hip,
        cudnn_built=build.cudnn_built,
        cudnn_loaded=build.cudnn_loaded,
        nccl=build.nccl,
        architectures=tuple(str(flags).split()),
        threads=torch.get_num_threads(),
        matmul_precision=reading(lambda: str(torch.get_float32_matmul_precision()), "set by fp32_precision"),
        has_context=torch.cuda.is_initialized(),
        is_bad_fork=bool(torch.cuda._is_in_bad_fork()),
    )


def _driver_facts(root: Path) -> DriverFacts:
    with NvmlReader() as reader:
        driver = reader.driver()
        if driver is None:
            return DriverFacts(version=_proc_driver(root), reason=reader.reason or "")
    version, cuda, gpus = driver
    return DriverFacts(
        version=version,
        cuda=cuda,
        gpus=tuple(GpuFact(name=name, capability=capability) for name, capability in gpus),
    )


def _proc_driver(root: Path) -> str:
    """Return the version of a driver that is loaded and does not answer NVML."""
    words = _text(root / "proc/driver/nvidia/version").split()
    return words[words.index("Module") + 1] if "Module" in words[:-1] else ""


def _limits(root: Path) -> ProcessLimits:
    try:
        import resource
    except ImportError:  # not a Unix
        return ProcessLimits()

    def limit(which: int, place: int = 0) -> int | None:
        value = resource.getrlimit(which)[place]
        return None if value == resource.RLIM_INFINITY else value

    pids = _text(root / "sys/fs/cgroup/pids.max").strip()
    processes = [each for each in (limit(resource.RLIMIT_NPROC), int(pids) if pids.isdigit() else None) if each is not None]
    return ProcessLimits(
        open_files=limit(resource.RLIMIT_NOFILE),
        open_files_most=limit(resource.RLIMIT_NOFILE, 1),
        locked_memory=limit(resource.RLIMIT_MEMLOCK),
        processes=min(processes, default=None),
    )


def _mapped(root: Path) -> tuple[tuple[str, str], ...]:
    """Return the shared libraries in this process, each by its name without version, and its path."""
    paths = {line.split(maxsplit=5)[-1] for line in _text(root / "proc/self/maps").splitlines() if ".so" in line}
    named = ((Path(path).name.partition(".so")[0], path) for path in paths)
    return tuple(sorted(named))


def _has_driver_open(root: Path) -> bool:
    """Say whether CUDA is initialised in this process. NVML, which nbguard reads, does not open this device."""
    try:
        links = list((root / "proc/self/fd").iterdir())
    except OSError:
        return False
    return any(_target(link) == "/dev/nvidia-uvm" for link in links)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile, or no link
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
