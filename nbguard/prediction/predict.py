"""`nbguard.predict`: the memory of a fit before it starts, by a trace of it on tensors without data."""

from __future__ import annotations

import time
from typing import Any

import torch

from nbguard.allocator.model.policy import parse_version
from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import NbguardError
from nbguard.prediction.fits.sources import source_of
from nbguard.prediction.hardware import gpu_of
from nbguard.prediction.largest_batch import largest_batch
from nbguard.prediction.prediction import Prediction
from nbguard.prediction.refusals import refuse
from nbguard.prediction.savings import savings as tried_savings
from nbguard.prediction.trace import FitTracer

_ASSUMPTIONS = (
    "the device is empty before it: what other notebooks, processes and earlier cells hold is not counted",
    "cuDNN's workspaces are not known: they are a part of the band, as cuDNN takes a smaller one where memory is short",
    "gradients are finite: no step of mixed precision is skipped",
)


def predict(
    learn: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    gpu: str | None = None,
    settings: str | None = None,
    precision: str | None = None,
    largest: bool = False,
    savings: bool = False,
) -> Prediction:
    """Return the memory that the next fit will take. Nothing runs on a GPU; nothing of the user's changes.

    A copy of the fit runs on tensors that have shapes and no data: a few training batches, and of a Learner the smaller last
    one and the validation. Their storages, and the buffers of CUDA's kernels, go through a model of PyTorch's allocator.

    Args:
        learn: what is fitted: a fastai Learner, Transformers' Trainer, a Lightning module, or a step of a loop over PyTorch,
            as a function of a batch that runs forward, backward and the optimizer's step.
        batch: a batch to go by, as the training loader yields it. Without, one is made from the first items of a Learner's or
            Trainer's training set; the others need it.
        batch_size: items of a batch; without, the loader's or the given batch's.
        gpu: a name ("T4", "A100", …) or a size ("16GiB"); without, nothing is said about whether it fits.
        settings: of the allocator, as `PYTORCH_ALLOC_CONF` writes them.
        precision: "bf16" or "fp16": mixed precision besides what is set already, for a Learner or a Lightning module.
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
    source = source_of(learn, batch, precision)
    refuse(source.modules)
    tracer = FitTracer(source=source, gpu=device, settings=parsed)
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
        phases=endless.phases,
        categories=endless.categories,
        peak=endless.peak,
        first_batch=endless.batch_peaks[0],
        steady=max(endless.batch_peaks[1:3], default=endless.batch_peaks[0]),
        band=endless.band,
        fits=fits,
        why=why,
        batch_sizes=endless.sizes,
        batches=endless.batches,
        largest=largest_batch(tracer, endless) if largest else None,
        savings=tried_savings(tracer, batch_size, endless, version) if savings else (),
        convolutions=endless.convolutions,
        seconds=time.perf_counter() - started,
        unknown=endless.unknown,
        assumptions=_ASSUMPTIONS,
    )
