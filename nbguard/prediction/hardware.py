"""GPUs by name: capacity, multiprocessors and architecture, by which CUDA's own temporaries are sized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from nbguard.errors import NbguardError
from nbguard.units import format_bytes, parse_bytes

GiB = 2**30
_CONTEXT = 600 * 2**20
"""Bytes of a CUDA context where nothing has measured it: contexts take 300 to 600 MiB."""


class WorkspaceCounts(NamedTuple):
    """Numbers of workspaces that torch keeps for cuBLAS, two at most: the forward pass's, then autograd's thread's."""

    cublas: int = 0
    cublaslt: int = 0  # those beside them, in the torch that keeps them


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as far as memory depends on it."""

    name: str  # as in the table below, or the size that was asked for
    capacity: int | None = None  # bytes of the device; None: not said, so that nothing can run out
    context: int = _CONTEXT  # bytes of the device that a CUDA context takes, with what other processes hold where that is known
    others: int | None = None  # bytes that other processes hold, of a GPU that this one has not opened; None: of any other GPU
    multiprocessors: int = 108  # number of SMs, by which split reductions are sized
    threads: int = 2048  # resident threads of one SM
    architecture: tuple[int, int] = (8, 0)  # compute capability

    @property
    def cublas_workspace(self) -> int:
        """Return the bytes of one cuBLAS workspace (`getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        return 32 * 2**20 if self.architecture[0] in (9, 10, 12) else 8_519_680


_KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="T4", capacity=15_360 * 2**20, multiprocessors=40, threads=1024, architecture=(7, 5)),
        Gpu(name="V100", capacity=16 * GiB, multiprocessors=80, architecture=(7, 0)),
        Gpu(name="P100", capacity=16 * GiB, multiprocessors=56, architecture=(6, 0)),
        Gpu(name="A10", capacity=23_028 * 2**20, multiprocessors=72, threads=1536, architecture=(8, 6)),
        Gpu(name="L4", capacity=23_034 * 2**20, multiprocessors=58, threads=1536, architecture=(8, 9)),
        Gpu(name="RTX3090", capacity=24 * GiB, multiprocessors=82, threads=1536, architecture=(8, 6)),
        Gpu(name="RTX4090", capacity=24_564 * 2**20, multiprocessors=128, threads=1536, architecture=(8, 9)),
        Gpu(name="A100", capacity=40 * GiB, multiprocessors=108, architecture=(8, 0)),
        Gpu(name="A100-80GB", capacity=80 * GiB, multiprocessors=108, architecture=(8, 0)),
        Gpu(name="H100", capacity=81_559 * 2**20, multiprocessors=132, architecture=(9, 0)),
    )
}


def gpu_of(text: str | None) -> Gpu:
    """Return the GPU of that name, or an A100 with that many bytes ("16GiB"); None: an A100 without end.

    Raises:
        NbguardError: there is no such name, and it is no size.
    """
    if text is None:
        return Gpu(name="a GPU of any size")
    wanted = text.replace(" ", "").upper().removeprefix("NVIDIA")
    if known := _KNOWN.get(wanted):
        return known
    try:
        capacity = parse_bytes(text)
    except ValueError:
        raise NbguardError(f"gpu is one of {', '.join(_KNOWN)}, or a size such as '16GiB', not {text!r:.40}") from None
    gpu = Gpu(name=f"a GPU of {format_bytes(capacity)}", capacity=capacity)
    if gpu.context >= capacity:
        raise NbguardError(
            f"a GPU of {format_bytes(capacity)} has no room beside a CUDA context of {format_bytes(gpu.context)}"
        )
    return gpu


def gpu_named(product: str) -> Gpu:
    """Return the GPU that the driver calls so, such as "NVIDIA H100 80GB HBM3"; one like an A100 if it is not known."""
    words = product.upper().replace("-", " ").split()
    names = (*words, *map("".join, pairwise(words)))
    return next((_KNOWN[name] for name in names if name in _KNOWN), Gpu(name=product))


def with_context(gpu: Gpu, context: int) -> Gpu:
    """Return `gpu` with a context of so many bytes."""
    return replace(gpu, context=context)
