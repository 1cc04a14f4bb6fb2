"""The versions, hardware, variables and switches around a run, read without importing or initialising anything."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nbguard.memory.scan.devices.host import dotted, library_versions, usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.training.runs.analysis.secrets import HIDDEN, RECORDED_VARIABLES, is_secret_name, without_secrets
from nbguard.training.runs.collector import FactCollector
from nbguard.units import format_bytes


def collect_versions(facts: FactCollector) -> None:
    """Collect Python, the distributions that are imported, and the libraries that torch was built with."""
    facts.add("versions", "python", platform.python_version())
    for name, version in imported_distributions():
        facts.add("versions", name, version)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        facts.miss("versions", "torch", "PyTorch is not imported")
        return
    build = library_versions(torch)
    named = {"CUDA": build.cuda, "ROCm": build.hip, "cuDNN": dotted(build.cudnn_loaded), "NCCL": dotted(build.nccl)}
    for name, version in named.items():
        if version:
            facts.add("versions", name, version)


def imported_distributions() -> list[tuple[str, str]]:
    """Return (distribution, version) of all whose modules are imported here, by name."""
    tops = {name.partition(".")[0] for name in list(sys.modules)} - set(sys.stdlib_module_names) - {"__main__", "__mp_main__"}
    return sorted({known for top in tops if (known := _distribution(top)) is not None}, key=lambda each: each[0].lower())


@cache
def _distribution(top: str) -> tuple[str, str] | None:
    """Return the distribution that a top-level module came with; None for one that came with none."""
    try:
        return top.replace("_", "-") if "_" in top else top, metadata.version(top)
    except (metadata.PackageNotFoundError, ValueError):
        return _owners().get(top)


@cache
def _owners() -> dict[str, tuple[str, str]]:
    """Return the distribution of each top-level name that an installed file begins with: a tenth of a second, once."""
    owners: dict[str, tuple[str, str]] = {}
    for each in metadata.distributions():
        for line in (each.read_text("RECORD") or "").splitlines():
            top = line.partition("/")[0]
            if "/" in line and top not in owners and not top.endswith((".dist-info", ".data")) and top not in ("..", "bin"):
                owners[top] = each.metadata["Name"], each.version
    return owners


def collect_hardware(facts: FactCollector) -> None:
    """Collect the processor, the memory and the GPUs as the driver names them."""
    facts.add("hardware", "processor", _processor() or platform.machine())
    facts.add("hardware", "cores", usable_cores())
    facts.attempt("hardware", "memory", lambda: facts.add("hardware", "memory", format_bytes(_memory())))
    with NvmlReader() as reader:
        driver = reader.driver()
        if driver is None:
            facts.miss("hardware", "GPUs", (reader.reason or "the driver does not answer").partition(":")[0])
            return
    version, cuda, gpus = driver
    facts.add("versions", "driver", f"{version}, CUDA up to {cuda[0]}.{cuda[1]}")
    facts.add("hardware", "GPUs", "; ".join(f"{name}, capability {major}.{minor}" for name, (major, minor) in gpus) or "none")


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor, whose instructions decide how sums are rounded."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def collect_variables(facts: FactCollector, variables: Mapping[str, str] = os.environ) -> None:
    """Collect the variables of the environment that computing libraries read, and no other."""
    for name, value in sorted(variables.items()):
        if name.startswith(RECORDED_VARIABLES):
            facts.add("variables", name, HIDDEN if is_secret_name(name) else without_secrets(value, keeps_hashes=False))


def collect_switches(facts: FactCollector) -> None:
    """Collect the switches of torch that decide how numbers are computed."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        facts.miss("precision", "switches", "PyTorch is not imported")
        return
    for name, read in _switches(torch):
        try:
            facts.add("precision", name, read())
        except (AttributeError, RuntimeError):
            facts.miss("precision", name, "this version of PyTorch does not tell")


def _switches(torch: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each switch with its reader; none initialises a device."""
    modes = {0: "off", 1: "warn only", 2: "on"}
    yield "deterministic mode", lambda: modes[torch.get_deterministic_debug_mode()]
    yield "cudnn.benchmark", lambda: bool(torch._C._get_cudnn_benchmark())
    yield "cudnn.deterministic", lambda: bool(torch._C._get_cudnn_deterministic())
    yield "float32 matmul", lambda: torch.get_float32_matmul_precision()
    yield "threads", lambda: torch.get_num_threads()
    yield "default dtype", lambda: str(torch.get_default_dtype())
    yield "autocast", lambda: bool(torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled())


def collect_place(facts: FactCollector, notebook: Path | None) -> None:
    """Collect where the run took place."""
    facts.add("place", "system", f"{platform.system()} {platform.release()}")
    facts.add("place", "host", socket.gethostname())
    facts.add("place", "folder", Path.cwd())
    if notebook is None:
        facts.miss("place", "notebook", "the program that started this kernel does not say which notebook it is")
    else:
        facts.add("place", "notebook", notebook)
