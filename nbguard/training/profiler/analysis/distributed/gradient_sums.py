"""The gradients that DistributedDataParallel sends between the ranks in each step, by its own count and clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.training.profiler.analysis.report import FitFinding
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
