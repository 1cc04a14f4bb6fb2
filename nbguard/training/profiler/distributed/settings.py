"""Settings of a rank that should be the same on all, such as variables, versions, driver, GPU, backend."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from nbguard.memory.scan.devices.library_versions import dotted, library_versions, reading
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.training.profiler.analysis.report import Setting

_PREFIXES = ("CUBLAS_", "CUDNN_", "FI_", "GLOO_", "MASTER_", "NCCL_", "PYTORCH_", "TORCH_NCCL_", "UCX_")
_NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


def environment() -> Iterator[Setting]:
    """Yield the settings. Nothing is imported, and no device is initialised."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES) or name in _NAMES:
            yield Setting(name, value)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:  # which ones may differ, how many should not
        yield Setting("number of CUDA_VISIBLE_DEVICES", str(len(devices.split(","))))
    yield _version("python", platform.python_version())
    yield from _packages()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield from _build(torch)
        yield from _device(torch)


def _packages() -> Iterator[Setting]:
    """Yield the versions of imported packages; one that only some ranks have imported is no difference."""
    for name, module in sorted(sys.modules.copy().items()):
        if "." in name or name.startswith("_") or name in sys.stdlib_module_names:
            continue
        version = getattr(module, "__dict__", {}).get("__version__")
        if isinstance(version, str) and version:
            yield _version(name, str(version))


def _build(torch: Any) -> Iterator[Setting]:
    build = library_versions(torch)
    versions = ("cuda", build.cuda), ("NCCL", dotted(build.nccl)), ("cuDNN", dotted(build.cudnn_loaded))
    for name, version in versions:
        if version:
            yield _version(name, version)


def _device(torch: Any) -> Iterator[Setting]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        yield Setting("backend", str(distributed.get_backend()))
    if not torch.cuda.is_initialized():
        return
    name = reading(lambda: str(torch.cuda.get_device_name()), "")
    if name:
        yield Setting("GPU model", name)
    with NvmlReader() as reader:
        driver = reader.driver()
    if driver is not None:
        yield _version("NVIDIA driver", driver[0])


def _version(name: str, version: str) -> Setting:
    return Setting(f"{name} version", version, is_version=True)
