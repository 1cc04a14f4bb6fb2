"""Other kernels on a device, by the command lines of their processes."""

from __future__ import annotations

from pathlib import Path

from nbguard.frontend.sidebar.hub.neighbours import Neighbours
from nbguard.memory.core.counters import TickReading
from nbguard.memory.core.facts import DeviceFacts, NvmlFacts, ProcessFact
from nbguard.units import GiB

KERNEL = "1b4f4f6e-9d4e-4a7e-8c1d-0123456789ab"
OTHER, STRANGER, GONE = 4711, 4712, 4713


def _reading(*pids: int, own: int = 1) -> TickReading:
    processes = tuple(ProcessFact(pid, (n + 1) * GiB) for n, pid in enumerate(pids))
    nvml = NvmlFacts(80 * GiB, 9 * GiB, processes)
    return TickReading(tracked="cuda", devices=(DeviceFacts(device="cuda:0", name="GPU", nvml=nvml),), pid=own)


def _proc(folder: Path) -> Path:
    for pid, line in (
        (OTHER, f"python\0-m\0ipykernel_launcher\0-f\0/run/kernel-{KERNEL}.json\0"),
        (STRANGER, "python\0train.py\0"),
    ):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "cmdline").write_bytes(line.encode())
    return folder


def test_kernels_are_known_by_their_connection_files_and_others_are_not_guessed_at(tmp_path: Path) -> None:
    neighbours = Neighbours(_proc(tmp_path)).of(_reading(1, OTHER, STRANGER, GONE))

    assert [(each.device, each.kernel, each.nbytes) for each in neighbours] == [
        ("cuda:0", "", 4 * GiB),
        ("cuda:0", "", 3 * GiB),
        ("cuda:0", KERNEL, 2 * GiB),
    ]


def test_pids_of_a_host_mean_nobody_here(tmp_path: Path) -> None:
    neighbours = Neighbours(_proc(tmp_path))

    assert neighbours.of(_reading(OTHER, STRANGER)) == ()
    assert neighbours.of(TickReading()) == ()
