"""Switches of the environment that cost time or spoil repeatability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.profiler.analysis.report import FitFinding, Setting
from nbguard.units import counted

_ENOUGH = 3
_SHAPES = 3
"""Shapes of inputs, batch size apart, that cudnn may well try algorithms for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchFacts:
    """The switches as they were in the first training batch, and the properties of the fit for which they matter."""

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
    evaluated: int = 0  # training batches looked at in which a model with dropout or batch norm was in eval mode
    trained: int = 0  # training batches looked at
    recorded_passes: int = 0  # passes over a loader in eval mode, without a loss to train on, in which graphs were recorded
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
            evidence="each operation keeps its stack and each backward function is checked for NaN: several times slower",
            change="`torch.autograd.set_detect_anomaly(False)`; `%%profile_fit --stop-on-nan` finds the layer without it",
            time=work // 2 or None,  # at least twice as slow, with small models more
        )
    if facts.blocks_launches:
        yield FitFinding(
            kind="switch",
            severity="advice" if facts.has_device else "note",
            what="CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel",
            evidence="no work is prepared while the GPU works: a switch for finding errors",
            change="`del os.environ['CUDA_LAUNCH_BLOCKING']` before CUDA is used: restart the kernel",
        )


def _modes(facts: SwitchFacts, work: int) -> Iterator[FitFinding]:
    if facts.evaluated >= _ENOUGH and 2 * facts.evaluated > facts.trained:
        yield FitFinding(
            kind="eval",
            severity="problem",
            what="the model is trained in eval mode",
            evidence=f"in {facts.evaluated} of the {facts.trained} training batches seen: no dropout, and batch norm keeps "
            "the statistics that it had",
            change="`model.train()` before the training batches, also after each validation",
        )
    if facts.recorded_passes:
        yield FitFinding(
            kind="no_grad",
            severity="advice",
            what="an evaluation records graphs that no backward pass uses",
            evidence=f"{counted(facts.recorded_passes, 'pass', 'passes')} over a loader with the model in eval mode, gradients "
            "enabled and no backward pass: the activations of each batch stay until its outputs go",
            change="`with torch.no_grad():` around the evaluation",
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
            what="cudnn.benchmark with inputs of many shapes",
            evidence=f"{facts.shapes} shapes, batch size apart: for each new one all algorithms are tried first",
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
            evidence="it repeats only if `torch.manual_seed` is called before, and everything else draws as often",
            change="`DataLoader(…, generator=torch.Generator().manual_seed(0), worker_init_fn=…)`",
        )
