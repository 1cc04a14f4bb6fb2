"""The launcher of this process by the variables that it set."""

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

POD = "KUBERNETES_SERVICE_HOST"
"""Set in each pod, also in one that is no rank: with RANK, an operator such as Kubeflow's has launched it."""

_OPERATOR = "PET_NNODES"
"""Set by Kubeflow's operator for torchrun, whose options it gives as PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE."""

_NUMBERS = (
    ("srun", ("SLURM_PROCID", "SLURM_NTASKS")),
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    ("mpirun", ("PMI_RANK", "PMI_SIZE")),
    ("torchrun", ("ROLE_RANK", "ROLE_WORLD_SIZE")),
    ("Kubernetes", ("PET_NODE_RANK", "PET_NNODES")),
)
"""The launchers' own names for the rank and the number of ranks; the first pair that is set tells."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launcher, and the place that it gave this process, or None."""

    launcher: str  # empty if none is known
    rank: int | None
    world: int | None

    @property
    def words(self) -> str:
        """Return it in words: "torchrun, rank 0 of 2"."""
        place = "" if self.rank is None or self.world is None else f"rank {self.rank} of {self.world}"
        return ", ".join(part for part in (self.launcher, place) if part) or "no launcher: one process"


def launch_of(variables: Mapping[str, str]) -> Launch:
    """Return the launcher of a process with these variables, with RANK and WORLD_SIZE, else by its own names."""
    launcher = _launcher(variables)
    rank, world = number(variables.get("RANK")), number(variables.get("WORLD_SIZE"))
    if rank is None and launcher not in ("", "torchrun"):
        names = own_names(launcher, variables)
        rank, world = (number(variables.get(name)) for name in names) if names else (None, None)
    return Launch(launcher, rank, world)


def _launcher(variables: Mapping[str, str]) -> str:
    launcher = next((name for variable, name in _LAUNCHERS if variable in variables), "")
    if launcher == "mpirun" and "PMI_RANK" in variables and variables["PMI_RANK"] == variables.get("SLURM_PROCID"):
        return "srun"  # it sets PMI's names, too; below mpirun SLURM numbers the hosts
    if not launcher and POD in variables and (number(variables.get("RANK")) is not None or _OPERATOR in variables):
        return "Kubernetes"
    return launcher


def own_names(launcher: str, variables: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a launcher's own names for rank and number of ranks, as far as it set them; None where it has none.

    They mean the same as RANK and WORLD_SIZE: not for one of several roles of torchrun, nor for a pod of several ranks.
    """
    if launcher == "torchrun" and variables.get("ROLE_NAME", "default") != "default":
        return None
    if launcher == "Kubernetes" and variables.get("PET_NPROC_PER_NODE", "1") != "1":
        return None
    return next((names for name, names in _NUMBERS if name == launcher and names[0] in variables), None)


def number(text: str | None) -> int | None:
    """Return a number that a variable holds; None where it holds none."""
    return int(text) if text is not None and text.strip().isdecimal() and len(text) < 10 else None
