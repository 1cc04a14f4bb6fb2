"""Checks that ranks hold the same model, by digests of parameters, gradients and buffers, and by their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nbguard.libraries import dividing_libraries
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.units import counted

TensorKind: TypeAlias = Literal["parameter", "gradient", "buffer"]

DIGEST = 8
"""Letters of a tensor's digest; NONE where it has no value, or none that can be compared."""
NONE = "-" * DIGEST
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BatchNorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName:
    """A tensor of a model, by its name there."""

    name: str  # "layers.0.weight"
    kind: TensorKind
    module: str  # class of the module that has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """The data and the optimizer settings of a rank, each None if unknown."""

    batch: int | None = None  # samples of a batch
    rate: float | None = None  # learning rate of the first group at the last check
    sampler: str = ""  # class of the sampler that divides the data; empty if none is known
    seed: int | None = None
    shard: int | None = None  # number of the part that this rank reads
    shards: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDigests:
    """The digests of one rank, by optimizer steps."""

    tensors: tuple[TensorName, ...] = ()
    checks: tuple[tuple[int, str], ...] = ()  # (number of the optimizer's step, digests of all tensors before it)
    feed: Feed = Feed()
    dropouts: int = 0  # modules that drop at random


def disagreements(ranks: Mapping[int, RankDigests], world: int) -> Iterator[FitFinding]:
    """Yield the differences between ranks, and the equivalent fit in one process.

    Args:
        ranks: the digests of each rank that has sent some.
        world: number of all ranks.
    """
    if len(ranks) < 2:
        return
    if len({digests.tensors for digests in ranks.values()}) > 1:
        yield from _models(ranks)
    else:
        yield from _values(ranks)
    yield from _feeds({rank: digests.feed for rank, digests in ranks.items()}, world)


def _models(ranks: Mapping[int, RankDigests]) -> Iterator[FitFinding]:
    sizes = "; ".join(f"rank {rank}: {counted(len(digests.tensors), 'tensor')}" for rank, digests in sorted(ranks.items()))
    change = "make the same model on all ranks: the same classes, sizes and heads"
    yield _finding("problem", "The ranks do not train the same model", f"their parameters have other names: {sizes}", change)


def _values(ranks: Mapping[int, RankDigests]) -> Iterator[FitFinding]:
    """Yield of each kind of tensor the first that differs, and since when; first those that nobody wanted."""
    tensors = next(iter(ranks.values())).tensors
    checks = {rank: dict(digests.checks) for rank, digests in ranks.items()}
    steps = sorted(set.intersection(*(set(each) for each in checks.values())))
    since: dict[int, tuple[int, dict[int, str]]] = {}  # of each tensor that differs: first step, digests by ranks
    for step in steps:
        for index in range(len(tensors)):
            values = {rank: each[step][DIGEST * index : DIGEST * (index + 1)] for rank, each in checks.items()}
            if index not in since and NONE not in values.values() and len(set(values.values())) > 1:
                since[index] = step, values
    unwanted = {index: each for index, each in since.items() if not _is_by_design(tensors[index])}
    kinds: tuple[TensorKind, ...] = ("parameter", "gradient", "buffer")
    if unwanted:
        start = min(step for step, _ in unwanted.values())
        for kind in kinds:
            first = [index for index, (step, _) in unwanted.items() if tensors[index].kind == kind and step == start]
            if first:
                yield _unlike(tensors[first[0]], len(first), start, unwanted[first[0]][1], steps)
    elif steps:
        compared = counted(len(tensors), "tensor")
        evidence = f"{compared} compared bit by bit before {_steps(steps)}"
        yield _finding("note", "All ranks hold the same model", evidence, "")
    if len(unwanted) < len(since):
        norm = next(tensors[index] for index in since if index not in unwanted)
        yield _finding(
            "note",
            f"`{norm.name}` of {norm.module} differs by design",
            "each rank's batch norm sees its own batch; DistributedDataParallel hands rank 0's on before the next",
            "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` if the ranks' batches are small",
        )
    dropouts = max(digests.dropouts for digests in ranks.values())
    if dropouts:
        evidence = f"{counted(dropouts, 'module')}, by each rank's own generator; no parameter differs for it"
        yield _finding("note", "Dropout differs by design", evidence, "")


def _is_by_design(tensor: TensorName) -> bool:
    return tensor.kind == "buffer" and tensor.module in _NORMS


def _unlike(tensor: TensorName, number: int, step: int, values: Mapping[int, str], steps: Sequence[int]) -> FitFinding:
    groups: dict[str, list[str]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(str(rank))
    sides = sorted(groups.values(), key=len)
    who = " and ".join(f"rank{'s' if len(side) > 1 else ''} {', '.join(side)}" for side in sides)
    earlier = [each for each in steps if each < step]
    before = f"; they agreed before step {earlier[-1]}" if earlier else ", the first that was compared"
    more = f", with {number - 1} more of its kind" if number > 1 else ""
    changes: dict[TensorKind, str] = {
        "parameter": "wrap it in `DistributedDataParallel` on all ranks before the first step, and change it on none alone",
        "gradient": "step only after a backward pass of the wrapped model, outside of `no_sync()`",
        "buffer": "register it where DistributedDataParallel can hand it on, or change it alike on all ranks",
    }
    kind = "gradient of" if tensor.kind == "gradient" else tensor.kind
    what = f"The {kind} `{tensor.name}` of {tensor.module} differs between ranks"
    return _finding("problem", what, f"{who} since the optimizer's step {step}{before}{more}", changes[tensor.kind])


def _feeds(feeds: Mapping[int, Feed], world: int) -> Iterator[FitFinding]:
    shards = {rank: feed.shard for rank, feed in feeds.items() if feed.shard is not None}
    seeds = {feed.seed for feed in feeds.values() if feed.seed is not None}
    if not shards and world > 1 and all(feed.batch for feed in feeds.values()):
        loaders = " or ".join(f"{name}'s" for name in dividing_libraries())
        evidence = f"no sampler divides the data that nbguard knows: DistributedSampler, or {loaders} loader"
        yield _finding(
            "advice", "Each rank may read all of the data", evidence, "`DataLoader(…, sampler=DistributedSampler(data))`"
        )
    if len(set(shards.values())) < len(shards):
        evidence = "; ".join(f"rank {rank}: part {shard}" for rank, shard in sorted(shards.items()))
        yield _finding(
            "problem", "Ranks read the same part of the data", evidence, "`DistributedSampler(data, rank=dist.get_rank())`"
        )
    if len(seeds) > 1:
        evidence = "; ".join(f"rank {rank}: seed {feed.seed}" for rank, feed in sorted(feeds.items()))
        what = "The samplers have different seeds: their parts overlap"
        yield _finding("problem", what, evidence, "give `DistributedSampler` the same `seed` on all ranks")
    rates = {feed.rate for feed in feeds.values()}
    if len(rates) > 1:
        evidence = "; ".join(f"rank {rank}: {feed.rate:g}" for rank, feed in sorted(feeds.items()) if feed.rate is not None)
        yield _finding("problem", "The ranks step with different learning rates", evidence, "schedule it alike on all ranks")
    batches = [feed.batch for feed in feeds.values() if feed.batch]
    if len(batches) == world > 1:
        (rate, *_) = rates
        of_rate = "" if rate is None else f", at a learning rate of {rate:g}"
        yield _finding(
            "note",
            f"A step learns from {sum(batches)} samples",
            f"{world} ranks with {' + '.join(map(str, batches))}{of_rate}; one process with batches of {batches[0]} learns from"
            f" {batches[0]} at each step, and steps {sum(batches) / batches[0]:g} times as often",
            "compare runs by samples, not by steps; many scale the learning rate with the samples of a step",
        )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"


def _finding(severity: str, what: str, evidence: str, change: str) -> FitFinding:
    return FitFinding(kind="rank", severity=severity, what=what, evidence=evidence, change=change)  # type: ignore[arg-type]
