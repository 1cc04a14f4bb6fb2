"""Switches of torch and the environment that cost time or spoil repeatability."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.advice import STOP_ON_NAN
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of
from nbguard.training.profiler.analysis.report import FitFinding, Setting
from nbguard.training.profiler.checks.amp import autocast_dtypes
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.recorder import Recorder


@contextmanager
def unwarned(category: type[Warning] = Warning) -> Iterator[None]:
    """Show no warnings of a category meanwhile.

    `warnings.catch_warnings` makes Python forget the warnings it has shown once: the user's cells would show it again.
    """
    filters: Any = warnings.filters
    ignored = ("ignore", None, category, None, 0)
    filters.insert(0, ignored)
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody set other filters meanwhile
            filters.remove(ignored)


_ENOUGH = 3
_SHAPES = 3
"""Shapes of inputs, batch size apart, that cudnn may well try algorithms for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchFacts:
    """The switches as they were in the first training batch, and the properties of the fit that make them matter."""

    settings: tuple[Setting, ...] = ()  # switches by name, for the table in the report
    detects_anomalies: bool = False  # torch.autograd.set_detect_anomaly was on, at some time
    blocks_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1
    benchmarks: bool = False  # torch.backends.cudnn.benchmark
    is_deterministic: bool = False  # torch.use_deterministic_algorithms
    has_device: bool = False  # CUDA was in use
    shapes: int = 0  # of inputs, batch size apart, while `benchmarks`; counted to a limit
    batch_size: int | None = None  # of the first input of the first training batch
    convolves: bool = False  # the model has two-dimensional convolutions
    is_channels_last: bool = False  # and their weights are laid out so
    is_double: bool = False  # its parameters are float64
    evaluated: int = 0  # sampled training batches with a model with dropout or batch norm in eval mode
    trained: int = 0  # training batches looked at
    unseeded: tuple[str, ...] = ()  # parts of the loaders that draw from global generators


def switch_findings(facts: SwitchFacts, work: int = 0) -> tuple[FitFinding, ...]:
    """Return the switches that stand out. `work`: nanoseconds of a batch in forward and backward passes."""
    return (*_debugging(facts, work), *_modes(facts, work), *_benchmark(facts), *_determinism(facts))


def _debugging(facts: SwitchFacts, work: int) -> Iterator[FitFinding]:
    if facts.detects_anomalies:
        yield FitFinding(
            kind="switch",
            severity="advice",
            what="anomaly detection is on",
            evidence="each operation keeps its stack, and each backward function is checked for NaN, which takes "
            "several times as long",
            change="`torch.autograd.set_detect_anomaly(False)`; " + STOP_ON_NAN.code + " finds the layer without it",
            time=work // 2 or None,  # at least twice as slow, with small models more
        )
    if facts.blocks_launches:
        yield FitFinding(
            kind="switch",
            severity="advice" if facts.has_device else "note",
            what="CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel",
            evidence="no work is prepared while the GPU computes; the switch is meant for finding errors",
            change="restart the kernel, and run `del os.environ['CUDA_LAUNCH_BLOCKING']` before CUDA is used",
        )


def _modes(facts: SwitchFacts, work: int) -> Iterator[FitFinding]:
    if facts.evaluated >= _ENOUGH and 2 * facts.evaluated > facts.trained:
        yield FitFinding(
            kind="eval",
            severity="problem",
            what="the model is trained in eval mode",
            evidence=f"in {facts.evaluated} of the {facts.trained} training batches seen, so dropout is off and batch norm "
            "does not update its statistics",
            change="`model.train()` before the training batches, also after each validation",
        )
    if facts.is_double:
        yield FitFinding(
            kind="float64",
            severity="advice",
            what="the model computes in float64",
            evidence="twice the memory of float32, and at least twice the time; on most GPUs 32 times",
            change="`model.float()`, and inputs of `torch.float32` (NumPy arrays are float64 by default)",
            time=work // 2 or None,
        )


def _benchmark(facts: SwitchFacts) -> Iterator[FitFinding]:
    if facts.benchmarks and facts.shapes > _SHAPES:
        yield FitFinding(
            kind="switch",
            severity="advice" if facts.has_device else "note",
            what="cudnn.benchmark is on, and the inputs have many shapes",
            evidence=f"{facts.shapes} shapes, not counting the batch size; cuDNN tries all its algorithms for each new one",
            change="`torch.backends.cudnn.benchmark = False`, or pad the inputs to a few sizes",
        )


def _determinism(facts: SwitchFacts) -> Iterator[FitFinding]:
    if not facts.is_deterministic:
        return
    if facts.benchmarks:
        yield FitFinding(
            kind="switch",
            severity="advice" if facts.has_device else "note",
            what="determinism is asked for, and cudnn.benchmark is on",
            evidence="which algorithm is the fastest can differ from run to run, and with it the rounding",
            change="`torch.backends.cudnn.benchmark = False`",
        )
    if facts.unseeded:
        yield FitFinding(
            kind="switch",
            severity="note",
            what=f"determinism is asked for, and {' and '.join(facts.unseeded)} draws from the global generator",
            evidence="it repeats only if `torch.manual_seed` is called first and everything else draws the same number of "
            "times",
            change="`DataLoader(…, generator=torch.Generator().manual_seed(0), worker_init_fn=…)`",
        )


_BATCHES = 16
"""Training batches that tell whether the model is in eval mode."""
_LIMIT = 64
"""Shapes that are kept to tell them apart."""


def settings() -> tuple[Setting, ...]:
    """Return the switches as they are now. Opens no device."""
    torch: Any = sys.modules["torch"]
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


class SwitchWatch:
    """Reads the switches in the first training batch, and sees whether the fit is of a kind that makes them matter."""

    watches = "switches of torch"
    name = "switches"
    facts = SwitchFacts

    def __init__(self) -> None:
        self._shapes: set[Any] = set()
        self._unseeded: dict[str, None] = {}
        self._detects_anomalies = False
        self._is_evaluated = False  # the model of this batch
        self._evaluated = self._trained = 0
        self._facts: SwitchFacts | None = None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        self._torch: Any = sys.modules["torch"]
        self._recorder = recorder
        recorder.subscribe("model", self._model)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("loader", self._loader)

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
        )

    @staticmethod
    def diagnose(facts: SwitchFacts, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the switches that stand out."""
        return switch_findings(facts, fit.work)

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

    def _model(self, _module: Any, _args: Any) -> None:
        self._recorder.subscribe("forward", self._forward)

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
        sampler = attribute_of(attribute_of(iterator, "_index_sampler"), "sampler")
        drawn = self._torch.utils.data.RandomSampler in mro_of(type(sampler))
        if drawn and attribute_of(sampler, "generator") is None:
            self._unseeded["the loader's order"] = None
        if attribute_of(iterator, "_num_workers") and attribute_of(iterator, "_worker_init_fn") is None:
            self._unseeded["the seed of its workers"] = None
