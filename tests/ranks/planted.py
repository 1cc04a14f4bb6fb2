"""The planted faults of `faults.py`, and what must be said of each. Needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("faults.py").read_text().splitlines()
_FUNCTIONS = [match[1] for line in _SOURCE if (match := re.match(r"def (\w+)\(rank: int, world: int\)", line))]


def second(_world: int) -> Sequence[int]:
    return [1]


def first(_world: int) -> Sequence[int]:
    return [0]


def first_two(_world: int) -> Sequence[int]:
    return [0, 1]


def every(world: int) -> Sequence[int]:
    return range(world)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault and what must be said of it."""

    name: str  # of its function
    kinds: tuple[str, ...]  # that fit
    at_fault: Callable[[int], Sequence[int]] = second  # the ranks, by the number of all
    pair: Sequence[int] | None = None  # the ranks at fault where there are two, if others: of two that differ both are named
    collective: str = ""  # that must be named; empty: none
    is_placed: bool = True  # whether the line must be named
    ends: bool = False  # whether it ends by itself, without the watchdog

    def culprits(self, world: int) -> list[int]:
        return sorted(self.pair if world == 2 and self.pair is not None else self.at_fault(world))

    @property
    def lines(self) -> list[str]:
        """Return the lines that may be named, as `faults.py:12`."""
        return [f"faults.py:{at}" for at, line in enumerate(_SOURCE, 1) if line.endswith(f"# <- {self.name}")]


FAULTS = (
    Planted(name="skips_before_a_barrier", kinds=("left out",), collective="all_reduce"),
    Planted(name="skips_in_the_fifth_round", kinds=("left out",), collective="broadcast"),
    Planted(name="skips_one_of_many_alike", kinds=("left out",), collective="all_reduce"),
    Planted(name="another_type_at_one_line", kinds=("type",), collective="all_reduce", pair=(0, 1)),
    Planted(name="another_order", kinds=("order", "left out"), collective="all_reduce"),
    Planted(name="another_size", kinds=("size",), collective="all_reduce", pair=(0, 1), ends=True),
    Planted(name="another_dtype", kinds=("dtype",), collective="all_reduce", pair=(0, 1), ends=True),
    Planted(name="another_size_to_broadcast", kinds=("size",), collective="broadcast", pair=(0, 1), ends=True),
    Planted(name="another_root", kinds=("root or operation",), collective="broadcast", pair=(0, 1)),
    Planted(name="logs_on_one_rank", kinds=("extra", "left out"), collective="all_reduce", at_fault=first),
    Planted(name="waits_alone_for_a_checkpoint", kinds=("extra", "left out"), collective="barrier", at_fault=first, pair=(1,)),
    Planted(name="fewer_batches", kinds=("uneven batches",), collective="all_reduce"),
    Planted(name="fewer_batches_with_batchnorm", kinds=("uneven batches",), collective="broadcast"),
    Planted(name="stops_early_by_its_own_loss", kinds=("uneven batches",), collective="all_reduce"),
    Planted(name="skips_a_batch_with_nan", kinds=("uneven batches",), collective="all_reduce"),
    Planted(name="a_head_is_not_used", kinds=("unused parameters",), collective="all_reduce", ends=True),
    Planted(name="raises_on_one_rank", kinds=("raised",), ends=True),
    Planted(name="is_killed", kinds=("died",), ends=True, is_placed=False),
    Planted(name="exits_in_between", kinds=("died",), ends=True, is_placed=False),
    Planted(name="is_only_slow", kinds=("slow",), collective="all_reduce"),
    Planted(name="waits_for_a_lock", kinds=("stuck",), collective="all_reduce"),
    Planted(name="groups_in_another_order", kinds=("order",), collective="all_reduce", at_fault=every),
    Planted(name="a_message_is_not_sent", kinds=("point to point",), collective="recv"),
    Planted(name="both_wait_for_a_message", kinds=("point to point",), collective="recv", at_fault=first_two),
    Planted(name="leaves_a_metric_out", kinds=("left out",), collective="all_gather"),
    Planted(name="leaves_objects_out", kinds=("left out",), collective="all_gather"),
    Planted(name="in_a_group_of_its_own", kinds=("left out",), collective="all_reduce"),
    Planted(name="leaves_a_shard_out", kinds=("left out",), collective="reduce_scatter"),
)

HEALTHY = tuple(name for name in _FUNCTIONS if name not in {fault.name for fault in FAULTS})
"""Programs in which nothing is wrong, some of them very uneven."""
