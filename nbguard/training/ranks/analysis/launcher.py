"""The launcher of this process by the variables that it has set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LAUNCHERS = (
    ("ACCELERATE_TORCH_DEVICE", "accelerate"),
    ("ACCELERATE_MIXED_PRECISION", "accelerate"),
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("FORK_LAUNCHED", "notebook_launcher"),
    ("OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_RANK", "mpirun"),
    ("SLURM_PROCID", "srun"),
)
"""A variable that only this launcher sets; the first that is set tells. torchrun and accelerate also run below SLURM."""

_POD = "KUBERNETES_SERVICE_HOST"
"""Set in each pod, also in one that is no rank: with RANK, an operator such as Kubeflow's has launched it."""

RANK_VARIABLES = {"srun": ("SLURM_PROCID", "SLURM_NTASKS"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
"""The names that launchers have for the rank and the number of ranks, where they do not set RANK and WORLD_SIZE."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launcher, and the place that it has given this process; None: it has given none."""

    launcher: str  # empty: none is known
    rank: int | None
    world: int | None

    @property
    def words(self) -> str:
        """Return it in words: "torchrun, rank 0 of 2"."""
        place = "" if self.rank is None or self.world is None else f"rank {self.rank} of {self.world}"
        return ", ".join(part for part in (self.launcher, place) if part) or "no launcher: one process"


def launch_of(variables: Mapping[str, str]) -> Launch:
    """Return the launcher of a process with these variables, with RANK and WORLD_SIZE, else by its own names."""
    launcher = next((name for variable, name in _LAUNCHERS if variable in variables), "")
    rank, world = number(variables.get("RANK")), number(variables.get("WORLD_SIZE"))
    if rank is None and launcher in RANK_VARIABLES:
        rank, world = (number(variables.get(name)) for name in RANK_VARIABLES[launcher])
    if not launcher and rank is not None and _POD in variables:
        launcher = "Kubernetes"
    return Launch(launcher, rank, world)


def number(text: str | None) -> int | None:
    """Return a number that a variable holds; None where it holds none."""
    return int(text) if text is not None and text.strip().isdecimal() and len(text) < 10 else None
