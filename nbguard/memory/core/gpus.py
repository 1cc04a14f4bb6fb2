"""The GPUs of this machine as the driver shows them, with the processes on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.core.facts import ProcessFact
from nbguard.memory.core.processes import Judged
from nbguard.render.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The readings of one GPU, as the driver counts them by bus. Sizes are bytes."""

    index: int  # the driver's own, as in `nvidia-smi`
    name: str  # nvmlDeviceGetName
    total: int  # nvmlDeviceGetMemoryInfo(…).total
    used: int  # nvmlDeviceGetMemoryInfo(…).used
    capability: tuple[int, int] | None  # of computing: (8, 0); None if the driver does not say
    processes: tuple[ProcessFact, ...] = ()  # of all users, as the driver lists them


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus(Result):
    """The answer of `nbguard gpus`."""

    kind: ClassVar[str] = "gpus"
    view: ClassVar[str] = "nbguard.memory.core.views.device:gpus_blocks"

    gpus: tuple[GpuReading, ...] = ()  # by index
    driver: str = ""  # its version and the newest CUDA that it runs, in words; empty if it does not answer
    unavailable: str = ""  # why something could not be read; empty if all could
    processes: tuple[Judged, ...] = ()  # on the GPUs, each diagnosed as by `%reset_gpu --zombies`
