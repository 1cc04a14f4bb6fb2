"""`nbguard.predict`: the memory of a fit before it starts, by a trace of it on tensors without data."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from nbguard.allocator.model.policy import parse_version
from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import NbguardError, UnpredictableError
from nbguard.prediction.copies import in_order_of_moving
from nbguard.prediction.emulation import Emulation, PredictedOutOfMemoryError
from nbguard.prediction.fastai_fit import FastaiFit, fastai_fit, is_learner, same_randomness
from nbguard.prediction.hardware import Gpu, gpu_of
from nbguard.prediction.prediction import Prediction
from nbguard.units import format_bytes

_BAND = 0.05
"""Share of the reserved peak that stays free before a fit is said to fit: other versions of CUDA, kernels without a rule."""
_CONVOLUTIONS = 256 * 2**20
"""Bytes that stay free besides where cuDNN convolves: PyTorch takes a plan with a smaller workspace where one finds no room."""
_ASSUMPTIONS = (
    "the device is empty before it: what other notebooks, processes and earlier cells hold is not counted",
    "cuDNN's workspaces are not known: they are a part of the band, as cuDNN takes a smaller one where memory is short",
    "gradients are finite: no step of mixed precision is skipped",
)
_RECURRENT = "cuDNN's recurrent layers take workspaces and reserves that PyTorch does not tell"
_REFUSED = {
    "OptimizedModule": "torch.compile plans its own buffers",
    "DataParallel": "its replicas live on several devices",
    "DistributedDataParallel": "its buckets depend on the process group",
    "FullyShardedDataParallel": "its shards depend on the process group",
    "FSDPModule": "its shards depend on the process group",
    "ScriptModule": "TorchScript runs its operators without Python",
    "RecursiveScriptModule": "TorchScript runs its operators without Python",
    "LSTM": _RECURRENT,
    "GRU": _RECURRENT,
    "RNN": _RECURRENT,
}
"""Modules whose memory cannot be foreseen, by the class of torch's that they are, and why."""


def predict(
    learn: Any, batch: Any = None, *, batch_size: int | None = None, gpu: str | None = None, settings: str | None = None
) -> Prediction:
    """Return the memory that the next fit of a fastai Learner will take. Nothing runs on a GPU; nothing of the user's changes.

    A copy of the Learner is fitted on tensors that have shapes and no data: a few training batches, the smaller last one, the
    validation. Their storages, and the buffers of CUDA's kernels, go through a model of PyTorch's allocator.

    Args:
        learn: the Learner.
        batch: a batch to go by, as its training loader yields it; without, one is made from the training set's first items.
        batch_size: items of a batch; without, the loader's or the given batch's.
        gpu: a name ("T4", "A100", …) or a size ("16GiB"); without, nothing is said about whether it fits.
        settings: of the allocator, as `PYTORCH_ALLOC_CONF` writes them.

    Raises:
        UnpredictableError: the memory cannot be foreseen; the message names the operator, module or object that prevents it.
        NbguardError: an argument cannot be used.
    """
    started = time.perf_counter()
    device = gpu_of(gpu)
    parsed = AllocatorSettings.parse(settings or "", parse_version(str(torch.__version__)))
    if batch_size is not None and batch_size < 1:
        raise NbguardError(f"batch_size is a number of items above 0, not {batch_size}")
    if not is_learner(learn):
        raise NbguardError(f"predict takes a fastai Learner, not {type(learn).__name__}")
    _refuse(learn.model)
    endless = _trace(learn, batch, batch_size, replace(device, capacity=None), parsed)
    band = int(_BAND * endless.peak_reserved) + (_CONVOLUTIONS if endless.convolutions else 0)
    fits, why = _answer(learn, batch, batch_size, device, parsed, endless, band)
    return Prediction(
        gpu=device.name,
        capacity=device.capacity,
        context=device.context,
        settings=parsed.conf(),
        torch_version=str(torch.__version__),
        peak_allocated=endless.peak_allocated,
        peak_reserved=endless.peak_reserved,
        end_allocated=endless.end_allocated,
        model=endless.model,
        workspaces=endless.workspaces,
        band=band,
        fits=fits,
        why=why,
        batch_sizes=endless.fit.sizes,
        batches=endless.fit.batches,
        convolutions=endless.convolutions,
        seconds=time.perf_counter() - started,
        unknown=endless.unknown,
        assumptions=_ASSUMPTIONS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The figures of one trace. All sizes are bytes."""

    fit: FastaiFit
    peak_allocated: int  # most in tensors at once
    peak_reserved: int  # most that the allocator had at once
    end_allocated: int  # in tensors when the fit had ended
    model: int  # parameters and buffers
    workspaces: int  # of cuBLAS
    convolutions: int  # number of calls
    unknown: tuple[str, ...]  # what may take memory and was not traced


def _trace(learn: Any, batch: Any, batch_size: int | None, gpu: Gpu, settings: AllocatorSettings, reserve: int = 0) -> Traced:
    """Fit a copy of `learn` without data on a modelled GPU of which `reserve` bytes stay free.

    Raises:
        PredictedOutOfMemoryError: the GPU has no room.
    """
    fit = fastai_fit(learn, batch, batch_size)
    emulation = Emulation(gpu, settings, reserve)
    with same_randomness(), emulation:
        emulation.storages.note(in_order_of_moving(fit.model))
        model = emulation.device.model.allocated
        fit.run()
    emulation.settle()
    if emulation.device.broken:
        raise UnpredictableError(emulation.device.broken)
    reads = [f"{line} reads a value: which way the code takes then is not known" for line in emulation.operators.reads]
    left_out = [f"the callback {name} is not traced" for name in fit.left_out]
    attention = ["attention in half precision runs in cuDNN on this GPU"] if emulation.operators.attentions else []
    sparse = ["tensors without a storage of their own are used (sparse ones, wrappers)"] if emulation.storages.unseen else []
    modelled = emulation.device.model
    return Traced(
        fit=fit,
        peak_allocated=modelled.peak_allocated,
        peak_reserved=modelled.peak_reserved,
        end_allocated=modelled.allocated,
        model=model,
        workspaces=emulation.operators.workspaces,
        convolutions=emulation.operators.convolutions,
        unknown=(*left_out, *reads, *attention, *sparse),
    )


def _answer(
    learn: Any,
    batch: Any,
    batch_size: int | None,
    gpu: Gpu,
    settings: AllocatorSettings,
    endless: Traced,
    band: int,
) -> tuple[bool | None, str]:
    """Return whether the fit runs on `gpu`, and why: yes only if it does with the band kept free."""
    if gpu.capacity is None:
        return None, "no GPU was named: predict(learn, gpu='16GiB') says whether it fits there"
    room = gpu.capacity - gpu.context
    needed = format_bytes(endless.peak_reserved)
    if endless.peak_reserved + band > room and not _runs(learn, batch, batch_size, gpu, settings, band):
        if endless.peak_reserved > room and not _runs(learn, batch, batch_size, gpu, settings, 0):
            return False, f"the fit runs out of memory: {gpu.name} has {format_bytes(room)} beside CUDA's context"
        return (
            None,
            f"{needed} would be reserved, and less than {format_bytes(band)} of the device is left for what cannot be computed",
        )
    if endless.unknown:
        return None, f"{needed} would be reserved, and not all could be traced: {endless.unknown[0]}"
    return True, f"{needed} is reserved at most, of {format_bytes(room)} beside CUDA's context"


def _runs(learn: Any, batch: Any, batch_size: int | None, gpu: Gpu, settings: AllocatorSettings, reserve: int) -> bool:
    """Return whether the trace ends on a device of that size, where the allocator empties its cache when memory is short."""
    try:
        _trace(learn, batch, batch_size, gpu, settings, reserve)
    except PredictedOutOfMemoryError:
        return False
    return True


def _refuse(model: Any) -> None:
    """Refuse modules whose memory cannot be foreseen, by the path to the first of them."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            reason = _REFUSED.get(kind.__name__)
            if reason and str(kind.__module__).partition(".")[0] == "torch":
                where = f"model.{path}" if path else "the model"
                raise UnpredictableError(f"{where} is a {kind.__name__}: {reason}")
