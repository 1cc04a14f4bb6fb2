"""The versions of CUDA's libraries that PyTorch was built with and has loaded, read without initialising a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
