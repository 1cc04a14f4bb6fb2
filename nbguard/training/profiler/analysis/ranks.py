"""The ranks of a distributed fit together, with stragglers, uneven shares, differences, ranks that died or hang."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from nbguard.libraries import dividing_libraries
from nbguard.memory.core.advice import CHECK_RANKS
from nbguard.plain_data import from_plain
from nbguard.texts import Text, joined
from nbguard.training.profiler.analysis.report import FitFinding, RankReport, RankRow, Setting, gravest_first
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.ranks.analysis.facts import CollectiveCall, RankFault
from nbguard.units import MiB, counted, format_bytes, format_time

# --- The bytes that ranks send in each step, pure: DistributedDataParallel's by its own count and clock, FSDP's by its calls


_MUCH = 0.25
"""Share of a step that is worth advice on smaller sums, at least."""
_COMPRESS = (
    "`from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook; "
    "model.register_comm_hook(None, bf16_compress_hook)` before the first step halves the bytes of float32 gradients; "
    "fewer sums: add up the gradients of several batches under `model.no_sync()`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums:
    """The sums of gradients of one rank in a step. Times are means of the steps that DistributedDataParallel has timed."""

    nbytes: int  # of gradients
    calls: int  # of all-reduce, one for each bucket
    backend: str  # "nccl", "gloo", …
    time: int  # nanoseconds from the first sum to the last
    overlap: int  # nanoseconds of it beside the backward pass


def sums_finding(sums: GradientSums, hosts: int, step: int | None) -> FitFinding:
    """Return the bytes and the time of the sums as a finding.

    Args:
        sums: of rank 0.
        hosts: on which there are ranks, as far as known.
        step: nanoseconds of a whole batch, the median, or None if not known.
    """
    waited = max(sums.time - sums.overlap, 0)
    share = waited / step if step else 0.0
    over = f"over {hosts} hosts by {sums.backend}" if hosts > 1 else f"within one host by {sums.backend}"
    tree = "; NCCL adds up within each host before it does so between hosts" if hosts > 1 and sums.backend == "nccl" else ""
    return FitFinding(
        kind="rank",
        severity="note",
        what=f"{format_bytes(sums.nbytes)} of gradients are summed between the ranks in each step",
        evidence=f"{counted(sums.calls, 'all-reduce')} {over}; {format_time(sums.time)} per step, "
        f"{format_time(sums.overlap)} of it during the backward pass; waiting for the slowest rank is in it{tree}",
        change=_COMPRESS if share >= _MUCH else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCalls:
    """The collectives of one kind in a step under FSDP, between the same ranks."""

    name: str  # as of torch.distributed, without the form of its arguments: "all_gather"
    calls: int
    nbytes: int  # of the whole tensors, of which each rank has a shard; of all_reduce its own ones
    ranks: tuple[int, ...]
    device: str  # type of the model's device: "cuda"


_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}
"""Bytes of an element; two of any other type."""
_FORMS = ("_into_tensor", "_tensor", "_single")
_OF_FSDP = {"all_gather": "gathers", "reduce_scatter": "sums of gradients", "all_reduce": "sums of shards"}
"""The collectives of FSDP, each with the word for several of them."""


def shard_calls(
    calls: list[tuple[CollectiveCall, int]], groups: Mapping[str, tuple[int, ...]], device: str
) -> tuple[ShardCalls, ...]:
    """Return the collectives of a step under FSDP by kind and ranks.

    Args:
        calls: kinds of calls, each with their number in the step.
        groups: ranks of each process group.
        device: type of the model's device.
    """
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for call, times in calls:
        name = next((call.name.removesuffix(form) for form in _FORMS if call.name.endswith(form)), call.name)
        ranks = groups.get(call.group, ())
        if name in _OF_FSDP and call.elements is not None and len(ranks) > 1:
            shards = 1 if name == "all_reduce" else len(ranks)
            sums = found.setdefault((name, ranks), [0, 0])
            sums[0] += times
            sums[1] += times * shards * call.elements * _BYTES.get(call.dtype, 2)
    return tuple(
        ShardCalls(name=name, calls=calls, nbytes=nbytes, ranks=ranks, device=device)
        for (name, ranks), (calls, nbytes) in found.items()
    )


def shards_finding(shards: tuple[ShardCalls, ...], hosts: Mapping[int, str]) -> FitFinding:
    """Return the bytes of FSDP's collectives as a finding, with a mesh where gathers go between hosts that have several ranks.

    Args:
        shards: of rank 0, in a step.
        hosts: names of the ranks' hosts, as far as known.
    """
    gathers = [each for each in shards if each.name == "all_gather"]
    sizes = [len(_hosts(each, hosts)) for each in gathers]
    ways = (
        f"{counted(each.calls, each.name)} of {format_bytes(each.nbytes)}{_reach(each, hosts)}"
        for each in sorted(shards, key=lambda each: -each.nbytes)
    )
    return FitFinding(
        kind="rank",
        severity="note",
        what=f"{format_bytes(sum(each.nbytes for each in shards))} of shards go between the ranks in each step",
        evidence="; ".join(ways),
        change=_mesh(gathers[0], sizes[0]) if gathers and max(sizes) > 1 else "",
    )


def _reach(shards: ShardCalls, hosts: Mapping[int, str]) -> str:
    """Return over how many hosts a collective goes, in words; nothing where a rank that was not heard may be on another one."""
    count = len(_hosts(shards, hosts))
    if count > 1:
        return f" over {count} hosts"
    return " within one host" if all(rank in hosts for rank in shards.ranks) else ""


def _hosts(shards: ShardCalls, hosts: Mapping[int, str]) -> set[str]:
    return {hosts[rank] for rank in shards.ranks if rank in hosts}


def _mesh(gathers: ShardCalls, hosts: int) -> str:
    """Return the line that keeps gathers within hosts; none where a host has one rank, or one has more than another."""
    each, left = divmod(len(gathers.ranks), hosts)
    if left or each < 2:
        return ""
    mesh = f'mesh=init_device_mesh("{gathers.device}", ({hosts}, {each}), mesh_dim_names=("hosts", "ranks"))'
    return (
        f"`fully_shard(model, {mesh})` (`from torch.distributed.device_mesh import init_device_mesh`) gathers within each "
        f"host; between hosts only 1/{each} of the gradients are summed, and each host keeps a whole model"
    )


# --- Checks that ranks hold the same model, by digests of parameters, gradients and buffers, and by their data.


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
    yield _agreement_finding(
        "problem", "The ranks do not train the same model", f"their parameters have other names: {sizes}", change
    )


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
        yield _agreement_finding("note", "All ranks hold the same model", evidence, "")
    if len(unwanted) < len(since):
        norm = next(tensors[index] for index in since if index not in unwanted)
        yield _agreement_finding(
            "note",
            f"`{norm.name}` of {norm.module} differs by design",
            "each rank's batch norm sees its own batch; DistributedDataParallel hands rank 0's on before the next",
            "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` if the ranks' batches are small",
        )
    dropouts = max(digests.dropouts for digests in ranks.values())
    if dropouts:
        evidence = f"{counted(dropouts, 'module')}, by each rank's own generator; no parameter differs for it"
        yield _agreement_finding("note", "Dropout differs by design", evidence, "")


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
    return _agreement_finding("problem", what, f"{who} since the optimizer's step {step}{before}{more}", changes[tensor.kind])


def _feeds(feeds: Mapping[int, Feed], world: int) -> Iterator[FitFinding]:
    shards = {rank: feed.shard for rank, feed in feeds.items() if feed.shard is not None}
    seeds = {feed.seed for feed in feeds.values() if feed.seed is not None}
    if not shards and world > 1 and all(feed.batch for feed in feeds.values()):
        loaders = " or ".join(f"{name}'s" for name in dividing_libraries())
        evidence = f"no sampler divides the data that nbguard knows: DistributedSampler, or {loaders} loader"
        yield _agreement_finding(
            "advice", "Each rank may read all of the data", evidence, "`DataLoader(…, sampler=DistributedSampler(data))`"
        )
    if len(set(shards.values())) < len(shards):
        evidence = "; ".join(f"rank {rank}: part {shard}" for rank, shard in sorted(shards.items()))
        yield _agreement_finding(
            "problem", "Ranks read the same part of the data", evidence, "`DistributedSampler(data, rank=dist.get_rank())`"
        )
    if len(seeds) > 1:
        evidence = "; ".join(f"rank {rank}: seed {feed.seed}" for rank, feed in sorted(feeds.items()))
        what = "The samplers have different seeds: their parts overlap"
        yield _agreement_finding("problem", what, evidence, "give `DistributedSampler` the same `seed` on all ranks")
    rates = {feed.rate for feed in feeds.values()}
    if len(rates) > 1:
        evidence = "; ".join(f"rank {rank}: {feed.rate:g}" for rank, feed in sorted(feeds.items()) if feed.rate is not None)
        yield _agreement_finding(
            "problem", "The ranks step with different learning rates", evidence, "schedule it alike on all ranks"
        )
    batches = [feed.batch for feed in feeds.values() if feed.batch]
    if len(batches) == world > 1:
        (rate, *_) = rates
        of_rate = "" if rate is None else f", at a learning rate of {rate:g}"
        yield _agreement_finding(
            "note",
            f"A step learns from {sum(batches)} samples",
            f"{world} ranks with {' + '.join(map(str, batches))}{of_rate}; one process with batches of {batches[0]} learns from"
            f" {batches[0]} at each step, and steps {sum(batches) / batches[0]:g} times as often",
            "compare runs by samples, not by steps; many scale the learning rate with the samples of a step",
        )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"


def _agreement_finding(severity: str, what: str, evidence: str, change: str) -> FitFinding:
    return FitFinding(kind="rank", severity=severity, what=what, evidence=evidence, change=change)  # type: ignore[arg-type]


# --- Uneven shares of ranks in time, memory and batches.


_NOTICED = 0.10
"""A rank stands out by more than this share of the others' figure."""


def skews(rows: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield the stragglers, the ranks with more memory than others, and different numbers of batches."""
    for row in rows:
        others = [other for other in rows if other is not row]
        yield from _straggler(row, others)
        yield from _memory(row, others)
    yield from _batches([row for row in rows if row.state == "complete"])


def _straggler(row: RankRow, others: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on a rank that is slower than the others.

    Whole steps are equally long where ranks wait for each other, which they do in the backward pass: it is shorter on the
    rank that is waited for. So the rest of the step decides, if the others do wait or the whole step is longer, too.
    """
    timed = [other for other in others if other.step is not None]
    if row.step is None or not timed:
        return
    own, usual = _own(row), median(_own(other) for other in timed)
    excess = round(own - usual)
    step = median(other.step or 0 for other in timed)
    waiting = median(other.backward or 0 for other in timed) - (row.backward or 0)
    if excess <= _NOTICED * step or (waiting <= excess / 2 and row.step <= (1 + _NOTICED) * step):
        return
    evidence = f"{format_time(own)} per batch outside the backward pass, the other ranks {format_time(usual)}"
    data = (row.wait or 0) - median(other.wait or 0 for other in timed)
    if data > excess / 2:
        evidence += f"; {format_time(data)} of the difference is waiting for data"
    if waiting > excess / 2:
        evidence += f". The others wait for it, so their backward pass takes {format_time(waiting)} longer than its own"
    change = "make its data as fast as theirs (check transforms, disk, `num_workers` and cores)"
    if data <= excess / 2:
        place = f"{row.device} of {row.host}" if row.device else row.host
        change = f"look for other programs on {place}, and for work that only this rank does"
    yield FitFinding(
        kind="straggler",
        severity="advice",
        what=f"Rank {row.rank} is the straggler",
        evidence=evidence,
        change=change,
        time=excess,
    )


def _own(row: RankRow) -> int:
    return (row.step or 0) - (row.backward or 0)


def _memory(row: RankRow, others: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on a rank whose peak is higher than the others'."""
    peaks = [other.peak for other in others if other.peak]
    if not row.peak or not peaks:
        return
    usual = round(median(peaks))
    more = row.peak - usual
    if more > max(MiB, _NOTICED * usual):
        evidence = f"peak {format_bytes(row.peak)}, the other ranks {format_bytes(usual)}: {format_bytes(more)} more"
        change = (
            "look for data that only this rank holds, such as other ranks' tensors loaded to its device "
            "(`map_location`), logs or metrics"
        )
        yield FitFinding(
            kind="rank memory",
            severity="advice",
            what=f"Rank {row.rank} takes more memory",
            evidence=evidence,
            change=change,
            nbytes=more,
        )


def _batches(rows: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on ranks that have run different numbers of batches."""
    if len({row.batches for row in rows}) > 1:
        evidence = ", ".join(f"rank {row.rank}: {row.batches}" for row in rows)
        change = "give every rank the same number: `DistributedSampler`, or `drop_last=True`"
        what = "The ranks ran different numbers of batches, so one of them waits forever for the others"
        yield FitFinding(kind="rank", severity="problem", what=what, evidence=evidence, change=change)


_UNCOMPARED = Text("The ranks' models were not compared; ") + CHECK_RANKS.code + " does so bit by bit."
_PERIOD = 1_000_000_000
"""Nanoseconds without progress before a rank is said to make none, and never less than half of the time waited for it."""


@dataclass(frozen=True, slots=True)
class RankMessage:
    """The message that a rank sends to rank 0 at the end of its fit."""

    row: RankRow  # its figures
    environment: tuple[Setting, ...] = ()  # variables and versions that should be the same on all ranks
    digests: RankDigests | None = None  # of its model, where `--check-ranks` asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The last sign of life of a rank of this host."""

    rank: int  # its number
    pid: int  # of its process
    batch: int  # of the recording, training or validation, from 1; 0 if none yet
    phase: str  # that it ended last in this batch; "": none yet
    age: int  # nanoseconds since then
    is_alive: bool  # whether its process is


def message_of(text: str) -> RankMessage | None:
    """Return the message of a text; None if it cannot be read, as from another version."""
    try:
        message: RankMessage = from_plain(RankMessage, json.loads(text))
    except (ValueError, RecursionError):
        return None
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservations:
    """Everything that rank 0 knows of all ranks at the end of a fit."""

    world: int  # number of ranks
    host: str  # name of rank 0's host
    messages: tuple[RankMessage, ...]  # of the ranks that reported, rank 0 first
    pulses: tuple[Pulse, ...] = ()  # signs of life of ranks of the same host that did not report
    waited: int = 0  # nanoseconds that rank 0 waited for messages
    launch: str = ""  # launcher, rank and number of ranks, in words
    sums: GradientSums | None = None  # of rank 0's gradients, where DistributedDataParallel has timed them
    shards: tuple[ShardCalls, ...] = ()  # collectives of rank 0 in a step under FSDP; empty without it
    hang: RankFault | None = None  # cause for which ranks waited in vain, where the fit has not come to its end


def rank_report(observed: RankObservations) -> RankReport:
    """Return the report of all ranks."""
    world, waited, host = observed.world, observed.waited, observed.host
    heard = {message.row.rank: message for message in observed.messages}
    pulses = {pulse.rank: pulse for pulse in observed.pulses}
    rows, findings = [], []
    for rank in range(world):
        if rank in heard:
            rows.append(heard[rank].row)
            continue
        row, finding = _silent(rank, pulses.get(rank), waited, host)
        rows.append(row)
        findings.append(finding)
    if observed.hang is not None:
        fault = observed.hang
        findings.insert(0, _finding("problem", fault.what, "; ".join(fault.evidence), fault.remedy))
    digests = {rank: message.digests for rank, message in heard.items() if message.digests is not None}
    findings += [*disagreements(digests, world), *skews(rows), *_mismatches(observed.messages)]
    if observed.sums is not None:
        findings.append(sums_finding(observed.sums, len({row.host for row in rows if row.host}), rows[0].step))
    if observed.shards:
        findings.append(shards_finding(observed.shards, {row.rank: row.host for row in rows if row.host}))
    unheard = world - len(heard)
    words = [Text(f"{unheard} of {world} ranks did not report; waited {format_time(waited)}.")] if unheard else []
    words += [] if digests else [_UNCOMPARED]
    note = joined(" ", words)
    return RankReport(world=world, rows=tuple(rows), findings=gravest_first(findings), note=note, launch=observed.launch)


def _silent(rank: int, pulse: Pulse | None, waited: int, host: str) -> tuple[RankRow, FitFinding]:
    """Return the row and the finding of a rank that sent no message."""
    if pulse is None:
        words = f"it left no sign of life on {host} and did not report within {format_time(waited)}"
        change = "run the fit of every rank under nbguard.profile_fit(), not of one rank only"
        return RankRow(rank=rank, host="", pid=0, state="not heard of"), _finding(
            "advice", f"Nothing is known of rank {rank}", words, change
        )
    at, ago = where(pulse), format_time(pulse.age)
    if not pulse.is_alive:
        state, what = f"died {at}", f"Rank {rank} died {at}"
        evidence = f"its process {pulse.pid} is gone; its last sign of life was {ago} before this report"
        change = "read its own output; if there is none, it was killed, and `dmesg` shows whether the host ran out of memory"
        finding = _finding("problem", what, evidence, change)
    elif pulse.age >= max(_PERIOD, waited // 2):
        state, what = f"no progress for {ago} {at}", f"Rank {rank} hangs {at}"
        evidence = f"its process {pulse.pid} is alive, but it made no progress for {ago}{_next(pulse.phase)}"
        finding = _finding("problem", what, evidence, f"`py-spy dump --pid {pulse.pid}` shows the line where it waits")
    else:
        state, what = f"still running, {at}", f"Rank {rank} still runs"
        evidence = f"its last sign of life came {ago} before this report, {at}"
        finding = _finding("note", what, evidence, "")
    return RankRow(rank=rank, host=host, pid=pulse.pid, state=state, batches=pulse.batch), finding


def where(pulse: Pulse) -> str:
    """Return where in the fit a rank was last, e.g. 'in batch 5, after loss'."""
    if not pulse.batch:
        return "before its first batch"
    return f"in batch {pulse.batch}, after {pulse.phase}" if pulse.phase else f"in batch {pulse.batch}, before its data came"


def _next(phase: str) -> str:
    """Return the next phase in words, where it explains why a rank waits."""
    before_backward = phase in (phase_log.FORWARD, phase_log.LOSS)
    return "; next comes the backward pass, where ranks wait for each other" if before_backward else ""


_WHERE_KNOWN = frozenset({"backend", "GPU model"})
"""Settings that a rank may not know, besides the versions of packages that it has not imported."""
_REMEDIES = {
    "backend": ("problem", "give `init_process_group` the same backend on all ranks"),
    "GPU model": ("advice", "give all ranks the same GPU: the slowest sets the pace, and the smallest limits the batch"),
    "NVIDIA driver version": ("advice", "install the same NVIDIA driver on all hosts"),
}
"""The severity of a difference and its remedy, where that is not a variable or a package."""


def _mismatches(messages: Sequence[RankMessage]) -> Iterator[FitFinding]:
    """Yield the settings that are not the same on all ranks."""
    environments = {message.row.rank: {setting.name: setting.value for setting in message.environment} for message in messages}
    versions = {setting.name for message in messages for setting in message.environment if setting.is_version}
    for name in sorted({name for settings in environments.values() for name in settings}):
        ranks: dict[str, list[int]] = {}
        for rank, settings in sorted(environments.items()):
            if name in settings or name not in _WHERE_KNOWN | versions:
                ranks.setdefault(settings.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            evidence = "; ".join(f"rank {', '.join(map(str, numbers))}: {value}" for value, numbers in ranks.items())
            what = f"{name} is not the same on all ranks"
            if name in _REMEDIES:
                severity, change = _REMEDIES[name]
                yield _finding(severity, what, evidence, change)
            elif name in versions:
                yield _finding("problem", what, evidence, f"install the same {name} everywhere")
            else:
                yield _finding("advice", what, evidence, f"set `{name}` alike where the ranks are launched")


def _finding(severity: str, what: str, evidence: str, change: str) -> FitFinding:
    return FitFinding(kind="rank", severity=severity, what=what, evidence=evidence, change=change)  # type: ignore[arg-type]
