"""Facts of a launch: the launchers' variables, the listener at the port, the interfaces. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nbguard.training.ranks.analysis.meeting_point import PortOwner

PREFIXES = (
    "ACCELERATE_", "CUDA_VISIBLE_DEVICES", "FORK_LAUNCHED", "GLOO_", "GROUP_", "KUBERNETES_SERVICE_", "LOCAL_", "MASTER_",
    "NCCL_", "NODE_", "NVIDIA_VISIBLE_DEVICES", "OMPI_COMM_", "PET_", "PMI_", "RANK", "ROLE_", "SLURM_",
    "TORCHELASTIC_", "WORLD_SIZE",
)  # fmt: skip
"""Beginnings of the names of variables that launchers set or read."""

LEGACY = "torch.distributed.launch"
"""The module that torchrun has replaced; it, too, sets all of torchrun's variables."""


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Facts of a launch that can be read without taking part in it."""

    variables: tuple[tuple[str, str], ...]  # set ones whose names begin with PREFIXES
    pid: int
    port: int  # that would be used: MASTER_PORT, or the default
    listener: PortOwner | None = None  # at that port of this host; None without one
    addresses: tuple[str, ...] = ()  # that MASTER_ADDR stands for; empty if it is not set, or stands for none
    is_here: bool = False  # whether one of them is this host's
    has_agent: bool = False  # whether the launcher listens for the job, and no rank does
    interfaces: tuple[tuple[str, bool], ...] = ()  # name, and whether it is up
    has_group: bool = False  # whether torch.distributed is initialised in this process
    group_rank: int | None = None  # in it
    group_world: int | None = None
    has_accelerator: bool = False  # whether accelerate's state is made in this process: an Accelerator was
    legacy: tuple[str, ...] = ()  # arguments of the LEGACY launcher above this process; empty without one
    siblings: int = 0  # other processes of this user and parent with the same command

    @cached_property
    def variable(self) -> dict[str, str]:
        """Return the variables by name."""
        return dict(self.variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The outcome of two processes of this host that add a tensor together."""

    seconds: float
    error: str = ""  # empty if both have the sum
