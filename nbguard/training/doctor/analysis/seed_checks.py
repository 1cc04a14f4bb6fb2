"""Checks of seeds of loaders, splits and the interpreter, and of the switches of deterministic computing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.memory.core.advice import make_deterministic
from nbguard.texts import before_start
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.training.doctor.analysis.step_trace import Mode
from nbguard.training.runs.analysis.cell_seeds import CellCall, CellSeeds


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
