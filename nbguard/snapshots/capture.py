"""PyTorch's own snapshot of its allocator, and what that has no place for. Neither opens a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from nbguard.allocator.snapshot.snapshot import Sidecar
from nbguard.errors import NbguardError, NoTorchError
from nbguard.memory.facts import DeviceFacts
from nbguard.memory.graph import holdings
from nbguard.memory.unheld import workspace_blocks
from nbguard.scan.devices.cuda import allocator_settings, memory_fraction
from nbguard.scan.scan import Scan

Held = tuple[int, str, tuple[int, ...]]
"""(number of the device, who holds them, addresses of blocks)."""

_MOST_CELLS = 5000


def torch_snapshot() -> dict[str, Any]:
    """Return `torch.cuda.memory._snapshot()`: segments, and the history where one is recorded.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: CUDA is not in use, or this PyTorch has no snapshots.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise NoTorchError
    if not torch.cuda.is_initialized():
        raise NbguardError("CUDA is not in use in this kernel yet: its allocator has nothing that could be saved")
    try:
        found: dict[str, Any] = torch.cuda.memory._snapshot()
    except AttributeError:
        raise NbguardError("this PyTorch has no snapshots of its allocator") from None
    return found


def sidecar_of(devices: Iterable[DeviceFacts], settings: str | None = None) -> Sidecar:
    """Return what PyTorch's format lacks. By device as far as all are known: lists go by the device's number.

    Args:
        devices: from a look.
        settings: of the allocator, where the snapshot has them; else those of the environment.
    """
    torch: Any = sys.modules["torch"]
    facts = tuple(devices)
    shares = tuple(memory_fraction(number) if each.has_context else 1.0 for number, each in enumerate(facts))
    return Sidecar(
        torch_version=str(torch.__version__),
        settings=allocator_settings() if settings is None else settings,
        totals=_known(each.total for each in facts),
        frees=_known(each.free for each in facts),
        fractions=_known(shares),
        names=tuple(each.name for each in facts),
    )


def _known(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values up to the first that is not known."""
    found = []
    for value in values:
        if value is None:
            break
        found.append(value)
    return tuple(found)


def held_blocks(seen: Scan) -> tuple[Held, ...]:
    """Return who holds which blocks, in the words of `%gpumem`, the largest holders first."""
    facts, found = seen.facts, []
    for number, device in enumerate(facts.devices):
        for row, storages in holdings(facts.graph, device.device):
            addresses = tuple(sorted(facts.graph.storages[storage].address for storage in storages))
            if addresses:
                found.append((number, row.path if row.stale and row.path else row.label, addresses))
        workspaces = workspace_blocks(facts.graph, device)
        if workspaces:
            found.append((number, "cuBLAS workspaces", tuple(block.address for block in workspaces)))
    return tuple(found)


def cell_files() -> dict[str, int]:
    """Return the number of the cell for each file that IPython compiled one as, by the file's name without its folder."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)
    latest = list(known.items())[-_MOST_CELLS:] if type(known) is dict else []
    return {PurePath(file).name: int(number) for file, number in latest}
