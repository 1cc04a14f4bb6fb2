"""The bytes that ranks send in each step, pure: DistributedDataParallel's by its own count and clock, FSDP's by its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.ranks.analysis.facts import CollectiveCall
from nbguard.units import counted, format_bytes, format_time

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
