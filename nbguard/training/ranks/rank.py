"""The rank of this process, by its process group or its launcher."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

_printed: object = None


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a distributed fit, by its number."""

    rank: int  # from 0
    world: int  # number of ranks

    @property
    def here(self) -> int:
        """Return how many of the ranks run on this host, as far as the launcher tells: else all."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        return min(int(local), self.world) if local.isdecimal() and int(local) else self.world

    @property
    def is_all_here(self) -> bool:
        """Say whether all ranks are known to run on this host."""
        return os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)


def current_rank() -> Rank | None:
    """Return the rank of this process, by the process group or else by its launcher; None if it is the only process."""
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        process = Rank(distributed.get_rank(), distributed.get_world_size())
    else:
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and world.isdecimal()):
            return None
        process = Rank(int(rank), int(world))
    return process if process.world > 1 else None


def print_once(rank: Rank) -> None:
    """Print which rank this process is, at its first watch or fit: so ranks that were launched wrongly are seen early."""
    from nbguard.training.ranks.analysis.launch_errors import launch_of

    global _printed
    launch = replace(launch_of(os.environ), rank=rank.rank, world=rank.world)
    printed = os.getpid(), launch  # a fork of a rank may be another
    if printed != _printed:
        _printed = printed
        with suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"nbguard: {launch.words}, process {os.getpid()} on {socket.gethostname()}\n")
