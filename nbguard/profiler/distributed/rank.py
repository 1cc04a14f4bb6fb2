"""The rank of this process, and the settings that should be the same on all ranks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.profiler.analysis.report import Setting

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "MASTER_")
_NAMES = ("OMP_NUM_THREADS",)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a distributed fit, by its number."""

    rank: int  # from 0
    world: int  # number of ranks

    @property
    def is_all_here(self) -> bool:
        """Say whether all ranks are known to run on this host."""
        return os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)


def current_rank() -> Rank | None:
    """Return the rank of this process, by the process group or else by its launcher; None if it is the only process."""
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        process = Rank(distributed.get_rank(), distributed.get_world_size())
    else:
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and world.isdecimal()):
            return None
        process = Rank(int(rank), int(world))
    return process if process.world > 1 else None


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
