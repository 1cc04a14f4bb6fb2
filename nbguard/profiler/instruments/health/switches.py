"""Switches of torch and the environment that matter for speed or repeatability."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbguard.profiler.analysis.health.switches import SwitchFacts
from nbguard.profiler.analysis.report import Setting
from nbguard.profiler.instruments.health.autocast import autocast_dtypes
from nbguard.profiler.record.recorder import BY_HAND, Recorder
from nbguard.profiler.unwarned import unwarned
from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of, name_of

_BATCHES = 16
"""Training batches in which it is seen whether the model is in eval mode."""
_LIMIT = 64
"""Shapes that are kept to tell them apart."""


def settings() -> tuple[Setting, ...]:
    """Return the switches as they are now. Opens no device."""
    import torch

    backends: Any = torch.backends
    return (
        Setting("deterministic algorithms", _deterministic(torch)),
        Setting("cudnn.benchmark", _on(lambda: torch._C._get_cudnn_benchmark())),
        Setting("cudnn.deterministic", _on(lambda: torch._C._get_cudnn_deterministic())),
        Setting("cudnn.allow_tf32", _on(lambda: backends.cudnn.allow_tf32), "convolutions of float32 in TensorFloat-32"),
        Setting("float32 matmul precision", _text(torch.get_float32_matmul_precision), "`highest`: no TensorFloat-32"),
        Setting("anomaly detection", _on(torch.is_anomaly_enabled)),
        Setting("autocast", _autocast(torch)),
        Setting("threads", f"{torch.get_num_threads()}", f"{_cores()} cores may be used"),
        *(Setting(name, os.environ[name]) for name in _VARIABLES if name in os.environ),
    )


_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")


def _deterministic(torch: Any) -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _autocast(torch: Any) -> str:
    return ", ".join(f"{kind}: {dtype}".replace("torch.", "") for kind, dtype in autocast_dtypes(torch).items()) or "off"


def _on(read: Callable[[], object]) -> str:
    text = _text(read)
    return {"True": "on", "False": "off"}.get(text, text)


def _text(read: Callable[[], object]) -> str:
    try:
        with unwarned():  # that its name is an older one
            return f"{read()}"
    except RuntimeError:  # set through the newer `fp32_precision`, which this one does not show
        return "set by `fp32_precision`"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _images(torch: Any, module: Any, args: Any) -> dict[str, Any]:
    """Return the size of the first batch and the layout of the model's weights."""
    facts = {"is_double": _is_double(torch, module)}
    first = next((arg for arg in args if torch.Tensor in mro_of(type(arg))), None)
    if first is None or not first.dim():
        return facts
    kernels = [layer.weight for layer in module.modules() if type(layer) is torch.nn.Conv2d]
    last = [kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous() for kernel in kernels]
    return facts | {"batch_size": first.shape[0], "convolves": bool(kernels), "is_channels_last": any(last)}


def _is_double(torch: Any, module: Any) -> bool:
    """Say whether most parameters of a model are float64."""
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[parameter.dtype is torch.float64] += parameter.numel()
    return sizes[True] > sizes[False]


def _is_evaluated(module: Any) -> bool:
    """Say whether a model that can be trained has all of dropout and batch norm in eval mode."""
    if module.training or not any(parameter.requires_grad for parameter in module.parameters()):
        return False
    kinds = [layer for layer in module.modules() if name_of(type(layer)).startswith(("BatchNorm", "Dropout", "SyncBatchNorm"))]
    return bool(kinds) and not any(layer.training for layer in kinds)


def _records(torch: Any, module: Any, args: Any) -> bool:
    """Say whether a graph of a call is recorded for the sake of parameters alone: gradients of an input are asked for."""
    tensors = [arg for arg in args if torch.Tensor in mro_of(type(arg))]
    return any(parameter.requires_grad for parameter in module.parameters()) and not any(arg.requires_grad for arg in tensors)


class SwitchWatch:
    """Reads the switches in the first training batch, and sees whether the fit is of a kind for which they matter."""

    watches = "switches of torch"

    def __init__(self) -> None:
        self._shapes: set[Any] = set()
        self._unseeded: dict[str, None] = {}
        self._detects_anomalies = False
        self._is_evaluated = False  # the model of this batch
        self._evaluated = self._trained = 0
        self._losses = 0  # in the fit, when the latest pass over a loader began
        self._recorded: int | None = None  # the pass in which a model in eval mode was called with gradients enabled
        self._passes = 0  # of such, without a loss to train on
        self._facts: SwitchFacts | None = None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        import torch

        self._torch: Any = torch
        self._recorder = recorder
        recorder.subscribe("model", self._model)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("loader", self._loader)
        recorder.subscribe("end", self._end)

    def stop(self) -> None:
        """Read the switches now if no model was called."""
        self._facts = self._facts or self._read()

    def observe(self) -> SwitchFacts:
        """Return the observations; to be called after `stop`."""
        facts = self._facts or SwitchFacts()
        return replace(
            facts,
            detects_anomalies=self._detects_anomalies or facts.detects_anomalies,
            shapes=len(self._shapes),
            unseeded=tuple(self._unseeded),
            evaluated=self._evaluated,
            trained=self._trained,
            recorded_passes=self._passes,
        )

    def _loss(self, _: Any) -> None:
        if self._trained < _BATCHES:
            self._trained += 1
            self._evaluated += self._is_evaluated
        self._is_evaluated = False
        self._detects_anomalies |= self._torch.is_anomaly_enabled()

    def _read(self) -> SwitchFacts:
        torch = self._torch
        return SwitchFacts(
            settings=settings(),
            detects_anomalies=torch.is_anomaly_enabled(),
            blocks_launches=os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
            benchmarks=torch._C._get_cudnn_benchmark(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            has_device=torch.cuda.is_initialized(),
        )

    def _model(self, module: Any, args: Any) -> None:
        self._recorder.subscribe("forward", self._forward)
        if self._torch.is_grad_enabled() and not module.training and _records(self._torch, module, args):
            self._recorded = self._recorder.loop

    def _end(self) -> None:
        """Count a pass that has ended without a loss to train on, with a graph of each batch that nobody used."""
        recorder = self._recorder
        self._passes += self._recorded == recorder.loop != BY_HAND and recorder.losses == self._losses
        self._recorded = None

    def _forward(self, module: Any, args: Any) -> None:
        torch = self._torch
        if not torch.is_grad_enabled():
            return
        if not module.training:
            self._is_evaluated = _is_evaluated(module)
        if self._facts is None:
            self._facts = replace(self._read(), **_images(torch, module, args))
        watches_shapes = torch._C._get_cudnn_benchmark() and len(self._shapes) < _LIMIT
        if not watches_shapes and self._trained >= _BATCHES:
            self._recorder.unsubscribe("forward", self._forward)
        elif watches_shapes:
            self._shapes.add(tuple(arg.shape[1:] for arg in args if torch.Tensor in mro_of(type(arg))))

    def _loader(self, iterator: Any) -> None:
        self._losses = self._recorder.losses
        sampler = attribute_of(attribute_of(iterator, "_index_sampler"), "sampler")
        drawn = self._torch.utils.data.RandomSampler in mro_of(type(sampler))
        if drawn and attribute_of(sampler, "generator") is None:
            self._unseeded["the loader's order"] = None
        if attribute_of(iterator, "_num_workers") and attribute_of(iterator, "_worker_init_fn") is None:
            self._unseeded["the seed of its workers"] = None
