"""The settings that should be the same on all ranks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

from nbguard.profiler.analysis.report import Setting

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "MASTER_")
_NAMES = ("OMP_NUM_THREADS",)


def environment() -> Iterator[Setting]:
    """Yield the settings that should be the same on all ranks: variables of the communication, and versions."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES) or name in _NAMES:
            yield Setting(name, value)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:  # which ones may differ, how many should not
        yield Setting("number of CUDA_VISIBLE_DEVICES", str(len(devices.split(","))))
    yield Setting("python version", platform.python_version(), is_version=True)
    for name in ("torch", "fastai"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            yield Setting(f"{name} version", str(version), is_version=True)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda is not None:
        yield Setting("cuda version", str(cuda), is_version=True)
