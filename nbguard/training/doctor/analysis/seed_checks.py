"""Checks of the settings of a Learner or a loop, of the seeds of loaders, splits and Python, and of PyTorch's switches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.memory.core.advice import NAME_ONE, make_deterministic
from nbguard.texts import before_start
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, EnvironmentFacts, checked, not_checked
from nbguard.training.doctor.analysis.step_trace import Mode
from nbguard.training.runs.analysis.cell_seeds import CellCall, CellSeeds
from nbguard.units import HALF_ROUNDS_TO_ZERO, counted, format_bytes

# --- Checks of a Learner's or a loop's settings, on loaders, mixed precision, the optimizer's eps


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
    return (_learner_loaders(facts, environment), _precision(facts.precision))


def _learner_loaders(facts: LearnerFacts, environment: EnvironmentFacts) -> Check:
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


# --- seed checks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeeds:
    """The origin of a loader's random numbers."""

    name: str  # the training or the validation loader
    is_learners: bool = False  # its order comes from a generator that it made when it was made itself
    shuffles: bool = False
    workers: int = 0
    has_generator: bool = False  # a seed of its own was given to it: for its workers, and of torch's loader for the order
    sampler: str = ""  # class of a sampler with no generator of its own; empty if it has one, draws none, or is the loader's
    source: str = ""  # of the draws of a sampler that is not torch's, such as "random.shuffle"; empty for torch's generator


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchStates:
    """The switches of deterministic computing."""

    mode: Mode = "off"
    benchmark: bool = False  # cudnn.benchmark
    uses_gpu: bool = False  # the model is on a GPU
    tf32: tuple[str, ...] = ()  # switches that allow TensorFloat-32
    needs_cublas: bool = False  # this PyTorch asks for CUBLAS_WORKSPACE_CONFIG, which is not set
    hash_seed: str = ""  # PYTHONHASHSEED; empty if another one in each process
    threads: int = 1


def seed_checks(
    loaders: tuple[LoaderSeeds, ...], switches: SwitchStates, cells: CellSeeds | None, name: str = ""
) -> tuple[Check, ...]:
    """Return the checks. `cells` are None outside of a notebook."""
    is_seeded = bool(loaders) and all(loader.has_generator for loader in loaders)
    return (_loaders(loaders, name), _cells(cells, name, is_seeded=is_seeded), _switches(switches), _hash_seed(switches))


def _loaders(loaders: tuple[LoaderSeeds, ...], learn: str) -> Check:
    name = "loaders' seeds"
    if not loaders:
        return not_checked("determinism", name, "no loader was given")
    evidence = "; ".join(f"{loader.name}: {'shuffles' if loader.shuffles else 'in order'}" for loader in loaders)
    return checked("determinism", name, evidence, *(finding for loader in loaders for finding in _loader(loader, learn)))


def _loader(loader: LoaderSeeds, learn: str) -> Iterator[CheckFinding]:
    if loader.sampler or (loader.shuffles and not loader.is_learners and not loader.has_generator):
        origin = f"by {loader.source}" if loader.source else "from torch's global generator"
        yield CheckFinding(
            severity="note",
            what=f"{loader.name} draws its order {origin}" + (f", in its {loader.sampler}" if loader.sampler else ""),
            evidence="every other draw before an epoch changes the order",
            command=make_deterministic(learn).command,
        )
    if loader.workers and not loader.has_generator:
        yield CheckFinding(
            severity="note",
            what=f"{_workers(loader)} seeded from torch's global generator",
            evidence="every other draw before, and another number of workers, changes their augmentations",
            command=make_deterministic(learn).command,
        )


def _workers(loader: LoaderSeeds) -> str:
    return f"the worker of {loader.name} is" if loader.workers == 1 else f"the {loader.workers} workers of {loader.name} are"


def _cells(cells: CellSeeds | None, learn: str, *, is_seeded: bool) -> Check:
    """Return the check of a notebook's cells; loaders that have got a seed since do not depend on earlier cells."""
    name = "seeds in cells"
    if cells is None:
        return not_checked("determinism", name, "without IPython the cells' order of seeds, splits and loaders is not known")
    if not cells.loaders and not cells.splits:
        return checked("determinism", name, "no cell makes loaders or splits")
    seeds = f"seeds are set in {', '.join(call.place for call in cells.seeds[-2:])}" if cells.seeds else "no cell sets a seed"
    findings = [*_splits(cells), *(() if is_seeded else _order(cells, learn))]
    return checked("determinism", name, seeds, *findings)


def _splits(cells: CellSeeds) -> Iterator[CheckFinding]:
    for call in {(call.name, call.argument): call for call in cells.splits}.values():
        before = _before(cells.seeds, call)
        yield CheckFinding(
            severity="note" if before else "advice",
            what=f"`{call.name}` in {call.place} splits at random without `{call.argument}`",
            evidence=f"the global seed of {before.place} makes it repeat only if nothing else draws random numbers in between"
            if before
            else "each run validates on other items, so two runs' metrics cannot be compared",
            command=f"{call.name}(…, {call.argument}=42)"
            if call.argument != "generator"
            else f"{call.name}(…, generator=torch.Generator().manual_seed(42))",
        )


def _order(cells: CellSeeds, learn: str) -> Iterator[CheckFinding]:
    if not cells.loaders:
        return
    call = cells.loaders[-1]
    if _before(cells.seeds, call) is not None:
        return
    after = cells.seeds[-1] if cells.seeds else None
    yield CheckFinding(
        severity="advice",
        what=f"`{call.name}` in {call.place} makes loaders before any seed is set",
        evidence=f"the seed of {after.place} comes too late, because a Learner's loaders draw their seed when they are made"
        if after
        else "no cell sets a seed, so the order of the items differs in each run",
        command=make_deterministic(learn).command,
    )


def _before(seeds: tuple[CellCall, ...], call: CellCall) -> CellCall | None:
    """Return the last seed that was set before a call."""
    earlier = [seed for seed in seeds if seed.order < call.order]
    return earlier[-1] if earlier else None


def _switches(switches: SwitchStates) -> Check:
    evidence = f"deterministic mode {switches.mode}; cudnn.benchmark {'on' if switches.benchmark else 'off'}"
    return checked("determinism", "switches", evidence, *(_of_gpus(switches) if switches.uses_gpu else ()))


def _of_gpus(switches: SwitchStates) -> Iterator[CheckFinding]:
    """Yield the switches that let results on a GPU differ."""
    if switches.needs_cublas:
        yield CheckFinding(
            severity="advice",
            what="cuBLAS is not deterministic without CUBLAS_WORKSPACE_CONFIG",
            evidence="this PyTorch's deterministic mode raises at the first matrix product on the GPU",
            command="export CUBLAS_WORKSPACE_CONFIG=:4096:8   # " + before_start() + ": cuBLAS reads it only once",
        )
    if switches.benchmark:
        yield CheckFinding(
            severity="advice" if switches.mode == "on" else "note",
            what="cudnn.benchmark is on, so each run can pick another algorithm",
            evidence="other algorithms of a convolution round differently",
            command="torch.backends.cudnn.benchmark = False",
        )
    if switches.tf32:
        yield CheckFinding(
            severity="note",
            what="float32 is rounded to TensorFloat-32, on GPUs that have it",
            evidence="runs agree on one GPU, and differ from the third digit on between it and an older one",
            command="; ".join(f"{switch} = False" for switch in switches.tf32),
        )


def _hash_seed(switches: SwitchStates) -> Check:
    if switches.hash_seed:
        return checked("determinism", "hash seed", f"PYTHONHASHSEED={switches.hash_seed}")
    finding = CheckFinding(
        severity="note",
        what="the order of a set of strings differs in each kernel",
        evidence="PYTHONHASHSEED is not set; a vocabulary or a list of labels made from a set differs",
        command="export PYTHONHASHSEED=0   # " + before_start() + ": Python reads it only then",
    )
    return checked("determinism", "hash seed", "not set", finding)
