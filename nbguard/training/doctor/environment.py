"""The environment, read without importing, initialising or asking anything that is not there already."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbguard.memory.scan.devices.host import host_facts, library_versions, reading, usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.libraries import has_shared_state
from nbguard.training.doctor.analysis.diagnosis import (
    PREFIXES,
    WATCHED,
    CompilerFacts,
    DriverFacts,
    EnvironmentFacts,
    GpuFact,
    ProcessLimits,
    Toolkit,
    ToolkitFacts,
    TorchFacts,
)
from nbguard.training.doctor.cuda_start import cuda_line

# --- CUDA toolkits and the C++ compiler that extensions of PyTorch would be built with here.


_PATIENCE = 3  # seconds for a compiler to say its version
_HEADER = "cuda_runtime.h"
_NEWEST = 30
"""A major version of GCC beyond those that may be installed."""


def toolkit_facts(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> ToolkitFacts:
    """Return the toolkits of a machine, by PyTorch's own rule of choice. `root` is another place for /usr/local.

    Versions are read from the toolkits' files; a compiler without one is asked `--version`. Without a toolkit none is run.
    """
    path = variables.get("PATH", "")
    given = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=path)
    beside = root / "usr/local/cuda"
    found = Path(nvcc).parents[1] if nvcc else beside if beside.exists() else None
    home = Path(given) if given else found
    if home is None:
        return ToolkitFacts()
    others = sorted((root / "usr/local").glob("cuda-*"), reverse=True)
    places = [home, *([found] if found else []), *(place for place in others if (place / "bin/nvcc").is_file())]
    return ToolkitFacts(
        toolkits=tuple(_toolkit(place) for place in dict.fromkeys(places)),
        is_given=bool(given),
        compiler=_compiler(variables.get("CXX") or "c++", path),
        numbered=tuple(number for number in range(_NEWEST, 8, -1) if shutil.which(f"g++-{number}", path=path)),
    )


def _toolkit(home: Path) -> Toolkit:
    nvcc = home / "bin/nvcc"
    headers = [home / "include", *home.glob("targets/*/include")]
    limit = next(filter(None, (_newest_gcc(folder) for folder in headers)), None)
    return Toolkit(
        home=str(home),
        has_nvcc=nvcc.is_file(),
        has_headers=any((folder / _HEADER).is_file() for folder in headers),
        version=(_written(home) or _said(nvcc)) if nvcc.is_file() else None,
        newest_gcc=limit,
    )


def _written(home: Path) -> tuple[int, ...] | None:
    """Return the version of nvcc that a toolkit's own file tells."""
    try:
        parts = json.loads((home / "version.json").read_bytes())
        text = (parts.get("cuda_nvcc") or parts["cuda"])["version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return _numbers(str(text))


def _said(nvcc: Path) -> tuple[int, ...] | None:
    release = re.search(r"release (\d+\.\d+)", _output(str(nvcc)))
    return _numbers(release[1]) if release else None


def _newest_gcc(folder: Path) -> int | None:
    """Return the newest major version of GCC that a toolkit takes: its header refuses others by this comparison."""
    for name in ("crt/host_config.h", "host_config.h"):
        try:
            refuses = re.search(r"#\s*if\s+__GNUC__\s*>\s*(\d+)", (folder / name).read_text(errors="replace"))
        except OSError:
            continue
        if refuses:
            return int(refuses[1])
    return None


def _compiler(name: str, path: str) -> CompilerFacts | None:
    words = name.split()
    found = shutil.which(words[-1], path=path) if words else None  # "ccache g++"
    if found is None:
        return None
    line = next(iter(_output(found).splitlines()), "")
    versions = list(_versions(line))
    return CompilerFacts(path=found, is_gcc="clang" not in line, version=versions[-1] if versions else None)


def _versions(line: str) -> Iterator[tuple[int, ...]]:
    for text in re.findall(r"\d+(?:\.\d+)+", line):
        numbers = _numbers(text)
        if numbers:
            yield numbers


def _numbers(text: str) -> tuple[int, ...] | None:
    digits = re.match(r"\d{1,6}(?:\.\d{1,6})*", text)
    return tuple(map(int, digits[0].split("."))) if digits else None


def _output(program: str) -> str:
    try:
        run = subprocess.run(  # noqa: S603 - a compiler that is asked for its version
            [program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.decode(errors="replace")


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
