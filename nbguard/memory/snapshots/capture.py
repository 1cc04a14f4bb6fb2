"""PyTorch's own snapshot of its allocator, the switch of its history, and the facts a snapshot lacks. None opens a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from nbguard.errors import NbguardError, NoTorchError
from nbguard.memory.allocator.snapshot.snapshot import Sidecar
from nbguard.memory.cleanup.apply.allocator_history import start, stop
from nbguard.memory.core.facts import DeviceFacts
from nbguard.memory.core.recording import DEFAULT_ENTRIES, Recording
from nbguard.memory.core.references.holders import holdings, workspace_blocks
from nbguard.memory.scan.devices.cuda import allocator_settings, memory_fraction
from nbguard.memory.scan.scan import Scan
from nbguard.shell import running_shell

BlockHolder = tuple[int, str, tuple[int, ...]]
"""(number of the device, label of the holder, addresses of its blocks)."""

_MOST_CELLS = 5000
"""Cells whose file names are kept, the latest."""


def record(on: bool = True, entries: int = DEFAULT_ENTRIES) -> Recording:
    """Keep PyTorch's history of its allocator from now on, bounded, or end it and forget it; return the state afterwards.

    Where CUDA is not in use yet, recording begins when it is: no context is opened for it. A history that somebody else
    records is left alone, by both.

    Args:
        on: keep the history; False ends it.
        entries: how many to keep of each device, the latest.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: this PyTorch has no history that can be bounded.
    """
    return start(entries) if on else stop()


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
        raise NbguardError("CUDA is not in use in this kernel yet, so its allocator has nothing to save")
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    except AttributeError:
        raise NbguardError("this PyTorch has no snapshots of its allocator") from None
    return snapshot


def sidecar_of(devices: Iterable[DeviceFacts], settings: str | None = None) -> Sidecar:
    """Return the facts that PyTorch's format lacks. A list by device ends before the first device whose figure is unknown.

    Args:
        devices: from a scan, in the order of their numbers.
        settings: of the allocator, where the snapshot has them; by default from the environment.
    """
    torch: Any = sys.modules["torch"]
    facts = tuple(devices)
    fractions = tuple(memory_fraction(number) if device.has_context else 1.0 for number, device in enumerate(facts))
    return Sidecar(
        torch_version=str(torch.__version__),
        settings=allocator_settings() if settings is None else settings,
        totals=_known(device.total for device in facts),
        frees=_known(device.free for device in facts),
        fractions=_known(fractions),
        names=tuple(device.name for device in facts),
    )


def _known(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values before the first that is None."""
    known = []
    for value in values:
        if value is None:
            break
        known.append(value)
    return tuple(known)


def block_holders(scan: Scan) -> tuple[BlockHolder, ...]:
    """Return the holders of blocks in the words of `%gpumem`, device by device, the largest first."""
    facts = scan.facts
    holders: list[BlockHolder] = []
    for number, device in enumerate(facts.devices):
        for row, storages in holdings(facts.graph, device.device):
            addresses = tuple(sorted(facts.graph.storages[storage].address for storage in storages))
            if addresses:
                holders.append((number, row.path if row.stale and row.path else row.label, addresses))
        workspaces = workspace_blocks(facts.graph, device)
        if workspaces:
            holders.append((number, "cuBLAS workspaces", tuple(block.address for block in workspaces)))
    return tuple(holders)


def cell_files() -> dict[str, int]:
    """Return the number of the cell for each file that IPython compiled one as, by the file's name without its folder."""
    known = getattr(getattr(running_shell(), "compile", None), "_filename_map", None)
    latest = list(known.items())[-_MOST_CELLS:] if type(known) is dict else []
    return {PurePath(file).name: int(number) for file, number in latest}
