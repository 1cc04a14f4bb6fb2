"""Checks of a Learner's or a loop's settings, on loaders, mixed precision, the optimizer's eps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.memory.core.advice import NAME_ONE
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, EnvironmentFacts, checked, not_checked
from nbguard.units import HALF_ROUNDS_TO_ZERO, counted, format_bytes

_NOTHING = "no Learner was given: " + NAME_ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """A loader of batches as it is set up."""

    name: str  # the training or the validation loader
    workers: int
    prefetch: int = 2  # batches that each worker makes ahead
    pins: bool = False  # pin_memory
    batch: int | None = None  # bytes of a batch, where one was made; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFacts:
    """Mixed precision as it is set up."""

    scaler: str = ""  # class of the gradient scaler; empty if none
    growth_interval: int | None = None  # steps without overflow until the scale doubles
    is_scaling: bool = False  # the scaler is enabled
    half_parameters: int = 0  # parameters that are float16 themselves
    eps: tuple[float, ...] = ()  # of the optimizer's groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFacts:
    """The settings of a Learner or a loop."""

    loaders: tuple[LoaderSettings, ...] = ()
    precision: PrecisionFacts = PrecisionFacts()
    is_on_device: bool = False  # the model is on a GPU, or its fit moves it there


def learner_checks(facts: LearnerFacts | None, environment: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the checks of a Learner or loop; without one, say that they were not made."""
    if facts is None:
        return tuple(not_checked("environment", name, _NOTHING) for name in ("loaders", "mixed precision"))
    return (_loaders(facts, environment), _precision(facts.precision))


def _loaders(facts: LearnerFacts, environment: EnvironmentFacts) -> Check:
    if not facts.loaders:
        return not_checked("environment", "loaders", "no loader was given")
    evidence = "; ".join(f"{loader.name}: {counted(loader.workers, 'worker')}" for loader in facts.loaders)
    return checked("environment", "loaders", evidence, *_loader_findings(facts, environment))


def _loader_findings(facts: LearnerFacts, environment: EnvironmentFacts) -> Iterator[CheckFinding]:
    most = max(facts.loaders, key=lambda loader: loader.workers)
    if most.workers > environment.cores:
        yield CheckFinding(
            severity="advice",
            what=f"{most.name} has {counted(most.workers, 'worker')} on {counted(environment.cores, 'core')}",
            evidence="workers beyond the number of cores take turns, and each keeps its own batches in memory",
            command=f"# recreate the loaders with num_workers={environment.cores}",
        )
    free = environment.host.shm_free
    needs = [(loader, loader.workers * (loader.prefetch + 1) * (loader.batch or 0)) for loader in facts.loaders]
    loader, need = max(needs, key=lambda pair: pair[1])
    if free is not None and need > free:
        yield CheckFinding(
            severity="problem",
            what=f"{loader.name} can want {format_bytes(need)} of /dev/shm, and {format_bytes(free)} are free",
            evidence=f"{counted(loader.workers, 'worker')} × {loader.prefetch + 1} batches × {format_bytes(loader.batch)}; "
            "beyond that, workers die with a bus error",
            command="docker run --shm-size=8g …   # or fewer workers",
        )
    if facts.is_on_device and most.workers and not most.pins:
        yield CheckFinding(
            severity="note",
            what=f"{most.name} does not pin its memory",
            evidence="a copy from pinned memory overlaps the GPU's work",
            command="# recreate the loaders with pin_memory=True",
        )


def _precision(facts: PrecisionFacts) -> Check:
    half = f"{counted(facts.half_parameters, 'parameter')} in float16"
    evidence = f"{facts.scaler or 'no gradient scaler'}; {half}"
    return checked("environment", "mixed precision", evidence, *_precision_findings(facts))


def _precision_findings(facts: PrecisionFacts) -> Iterator[CheckFinding]:
    if facts.is_scaling and facts.growth_interval is not None and facts.growth_interval > 1_000_000:
        yield CheckFinding(
            severity="advice",
            what="the loss scale is static, so it never grows again",
            evidence=f"growth_interval={facts.growth_interval}: after an overflow it stays halved",
            command="torch.amp.GradScaler()   # its default doubles the scale after 2,000 steps without overflow",
        )
    eps = [value for value in facts.eps if value <= HALF_ROUNDS_TO_ZERO]
    if facts.half_parameters and eps:
        yield CheckFinding(
            severity="problem",
            what=f"eps={min(eps):g} of the optimizer is 0 in float16",
            evidence=f"{facts.half_parameters} parameters are float16, so their update divides by zero",
            command="learn.model.float(); learn.to_fp16()   # parameters in float32, the forward pass under autocast",
        )
    elif facts.half_parameters:
        yield CheckFinding(
            severity="advice",
            what="the parameters themselves are float16",
            evidence=f"{counted(facts.half_parameters, 'parameter')}: an update smaller than 1/2048 of a weight is lost",
            command="learn.model.float(); learn.to_fp16()   # parameters in float32, the forward pass under autocast",
        )
