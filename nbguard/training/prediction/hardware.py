"""The GPU of a prediction: capacity, multiprocessors and architecture, which size CUDA's own temporaries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from nbguard.errors import NbguardError
from nbguard.memory.core.gpu_models import GpuModel, gpu_model, gpu_model_in, gpu_size
from nbguard.units import format_bytes

_CONTEXT = 600 * 2**20
"""Bytes of a CUDA context where nothing has measured it: contexts take 300 to 600 MiB."""


class WorkspaceCounts(NamedTuple):
    """Numbers of workspaces that torch keeps for cuBLAS, two at most: the forward pass's, then autograd's thread's."""

    cublas: int = 0
    cublaslt: int = 0  # those beside them, in the torch that keeps them


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as far as memory depends on it."""

    name: str  # of its model, or the size that was asked for
    capacity: int | None = None  # bytes of the device; None if not said, so that nothing can run out
    context: int = _CONTEXT  # bytes of the device that a CUDA context takes, with other processes' bytes where known
    others: int | None = None  # bytes that other processes hold, of a GPU that this one has not opened; None for any other GPU
    multiprocessors: int = 108  # number of SMs, which decides the size of split reductions
    threads: int = 2048  # resident threads of one SM
    architecture: tuple[int, int] = (8, 0)  # compute capability

    @property
    def cublas_workspace(self) -> int:
        """Return the bytes of one cuBLAS workspace (`getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        return 32 * 2**20 if self.architecture[0] in (9, 10, 12) else 8_519_680


def gpu_of(text: str | None) -> Gpu:
    """Return the GPU of that name, or an A100 with that many bytes ("16GiB"); or for None an A100 without end.

    Raises:
        NbguardError: there is no such name, and it is no size.
    """
    if text is None:
        return Gpu(name="a GPU of any size")
    if model := gpu_model(text):
        return _like(model)
    try:
        capacity = gpu_size(text)
    except ValueError as error:
        raise NbguardError(str(error)) from None
    gpu = Gpu(name=f"a GPU of {format_bytes(capacity)}", capacity=capacity)
    if gpu.context >= capacity:
        raise NbguardError(
            f"a GPU of {format_bytes(capacity)} has no room next to a CUDA context of {format_bytes(gpu.context)}"
        )
    return gpu


def gpu_named(product: str) -> Gpu:
    """Return the GPU that the driver calls so, such as "NVIDIA H100 80GB HBM3"; one like an A100 if it is not known."""
    model = gpu_model_in(product)
    return Gpu(name=product) if model is None else _like(model)


def _like(model: GpuModel) -> Gpu:
    return Gpu(
        name=model.name,
        capacity=model.capacity,
        multiprocessors=model.multiprocessors,
        threads=model.threads,
        architecture=model.architecture,
    )


def with_context(gpu: Gpu, context: int) -> Gpu:
    """Return `gpu` with a context of so many bytes."""
    return replace(gpu, context=context)
