"""What is recorded, one process each: real fits, and states of the allocator. Importing this does not import torch."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

GIB = 1024**3
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Workload:
    """One recording: the function that runs, under which allocator settings, and how much of the device it may take."""

    function: str
    settings: str = ""
    amp: bool = False
    cap: int | None = None

    def run(self) -> tuple[Any, str]:
        """Run it, and return what must live while the snapshot is taken, and in words what ran."""
        found: tuple[Any, str] = pkgutil.resolve_name(f"tests.gpu.{self.function}")(**({"amp": True} if self.amp else {}))
        return found


WORKLOADS: dict[str, Workload] = {
    "cnn-fp32": Workload("fits:cnn"),
    "cnn-amp": Workload("fits:cnn", amp=True),
    "cnn-expandable": Workload("fits:cnn", EXPANDABLE),
    "transformer-fp32": Workload("fits:transformer"),
    "transformer-amp": Workload("fits:transformer", amp=True),
    "tabular-fp32": Workload("fits:tabular"),
    "tabular-amp": Workload("fits:tabular", amp=True),
    "oom": Workload("states:out_of_memory", cap=GIB),
    "oom-expandable": Workload("states:out_of_memory", EXPANDABLE, cap=GIB),
    "fragments": Workload("states:fragments"),
    "fragments-expandable": Workload("states:fragments", EXPANDABLE),
    "graph": Workload("states:graph"),
    "record-stream": Workload("states:record_stream"),
    "pools": Workload("states:pools"),
    "pool-left": Workload("states:pool_left"),
    "pinned": Workload("states:pinned"),
    "workspaces": Workload("states:workspaces"),
}
