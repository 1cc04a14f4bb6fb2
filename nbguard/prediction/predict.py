"""`nbguard.predict`: the memory of a fit before it starts, by a trace of it on tensors without data."""

from __future__ import annotations

import time
from typing import Any

import torch

from nbguard.allocator.model.policy import parse_version
from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import NbguardError, UnpredictableError
from nbguard.prediction.fastai_fit import batch_to_go_by, is_learner
from nbguard.prediction.hardware import gpu_of
from nbguard.prediction.largest_batch import largest_batch
from nbguard.prediction.prediction import Prediction
from nbguard.prediction.savings import savings as tried_savings
from nbguard.prediction.trace import FitTracer

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
    learn: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    gpu: str | None = None,
    settings: str | None = None,
    largest: bool = False,
    savings: bool = False,
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
        largest: whether to search for the largest batch that fits on `gpu`: some ten traces more.
        savings: whether to try what would save memory: a trace more for each change.

    Raises:
        UnpredictableError: the memory cannot be foreseen; the message names the operator, module or object that prevents it.
        NbguardError: an argument cannot be used.
    """
    started = time.perf_counter()
    device = gpu_of(gpu)
    version = parse_version(str(torch.__version__))
    parsed = AllocatorSettings.parse(settings or "", version)
    if batch_size is not None and batch_size < 1:
        raise NbguardError(f"batch_size is a number of items above 0, not {batch_size}")
    if largest and device.capacity is None:
        raise NbguardError("the largest batch is that of a GPU: name one, as in predict(learn, gpu='16GiB', largest=True)")
    if not is_learner(learn):
        raise NbguardError(f"predict takes a fastai Learner, not {type(learn).__name__}")
    _refuse(learn.model)
    tracer = FitTracer(learn=learn, batch=batch_to_go_by(learn, batch), gpu=device, settings=parsed)
    endless = tracer.endless(batch_size)
    fits, why = tracer.answer(batch_size, endless)
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
        band=endless.band,
        fits=fits,
        why=why,
        batch_sizes=endless.fit.sizes,
        batches=endless.fit.batches,
        largest=largest_batch(tracer, endless) if largest else None,
        savings=tried_savings(tracer, batch_size, endless, version) if savings else (),
        convolutions=endless.convolutions,
        seconds=time.perf_counter() - started,
        unknown=endless.unknown,
        assumptions=_ASSUMPTIONS,
    )


def _refuse(model: Any) -> None:
    """Refuse modules whose memory cannot be foreseen, by the path to the first of them."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            reason = _REFUSED.get(kind.__name__)
            if reason and str(kind.__module__).partition(".")[0] == "torch":
                where = f"model.{path}" if path else "the model"
                raise UnpredictableError(f"{where} is a {kind.__name__}: {reason}")
