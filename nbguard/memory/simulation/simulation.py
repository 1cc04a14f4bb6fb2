"""`nbguard.simulate`: runs code that works on CPU tensors against a model of a GPU's memory."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from nbguard.errors import NbguardError, SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version, segment_size
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import (
    AirbagFact,
    AllocatorStats,
    Block,
    DeviceFacts,
    Facts,
    NvmlFacts,
    ProcessFact,
    Segment,
    TickReading,
)
from nbguard.memory.core.gpu_models import gpu_size
from nbguard.memory.core.oom_facts import AllocatorCounts, OomNote
from nbguard.memory.core.recording import DEFAULT_ENTRIES, Recording, check_entries
from nbguard.memory.core.simulated import DEVICE, NAME, TRACKED, Simulated, on_simulated
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.reports.memory_map import MemoryMap, build_map
from nbguard.memory.reports.report import Report, build_report
from nbguard.memory.room.device import note_simulated
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.oom.chain import NOTES, as_torch_writes, cell_now, with_free_blocks
from nbguard.memory.scan.oom.failed_runs import full_collections
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.storage_events import StorageMode
from nbguard.memory.simulation.device import RESERVE, SimulatedDevice, SimulatedHistory
from nbguard.memory.simulation.room import SimulatedRoom
from nbguard.units import format_bytes

_TorchOutOfMemoryError: Any = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError


INSTEAD_OF_CUDA = (
    "nbguard: on a simulated device your code stays on CPU tensors, and this PyTorch finds no GPU. Write  device = 'cuda' if "
    "torch.cuda.is_available() else 'cpu'  and .to(device) instead of .cuda()."
)
"""The answer to code under a simulation that asks for a real CUDA device where there is none."""


class SimulatedCudaOutOfMemoryError(_TorchOutOfMemoryError):  # type: ignore[misc]
    """A simulated device has no room. Code that catches `torch.OutOfMemoryError` catches this, too."""


class Simulation:
    """A simulated device, and the switch that puts code on it: `with nbguard.simulate("16GiB") as sim: ...`.

    May be entered again: the device goes on as it is. Tensors that die in between are freed on it. It keeps no tensor alive and
    changes no result; only the thread that enters it is simulated.
    """

    def __init__(
        self,
        capacity: int,
        settings: AllocatorSettings,
        context: int,
        fraction: float | None,
        version: str,
        *,
        record: bool,
    ) -> None:
        self._device = SimulatedDevice(capacity, context, settings, fraction, version, self._refuse, records=record)
        self._mode = StorageMode(self._device)
        self._room = SimulatedRoom(self._device, self._mode, self._on_device, self._segments_of_reserve)
        self._version = version
        self.fraction: float = 1.0 if fraction is None else fraction  # of the device that the allocator may take
        self._recording = Recording("off")

    # --- the switch -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Simulation:
        if self._mode.is_entered:
            raise NbguardError("this simulation is already running; leave it before you enter it again")
        self._mode.__enter__()
        note_simulated(self._room, is_on=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._mode.leave()
        note_simulated(self._room, is_on=False)
        if error is not None and asked_for_cuda(error):
            error.args = (f"{error}\n{INSTEAD_OF_CUDA}",)

    def end(self) -> None:
        """End all that was set up on the device: an airbag, a budget, parked models. Nothing of theirs was ever moved."""
        self._room.end()

    @property
    def is_running(self) -> bool:
        """Return whether this thread's operations run on the simulated device."""
        return self._mode.is_entered

    def on_host(self, *tensors: Any) -> None:
        """Say that tensors are in host memory: neither they nor views of them count. A copy of one does, as `.to(device)`."""
        if wrong := next((type(each).__name__ for each in tensors if not isinstance(each, torch.Tensor)), ""):
            raise NbguardError(
                f"on_host takes tensors, not {wrong}: name them one by one, as in  sim.on_host(train_x, train_y)"
            )
        self._mode.leave_out(tensors)

    # --- the counters, by torch.cuda's names ------------------------------------------------------------------------------

    def memory_allocated(self) -> int:
        """Return the bytes in tensors now."""
        return self.figures().allocated

    def max_memory_allocated(self) -> int:
        """Return the most bytes that were in tensors at once, since the last reset."""
        return self.figures().peak_allocated

    def memory_reserved(self) -> int:
        """Return the bytes that the allocator has from the device now."""
        return self.figures().reserved

    def max_memory_reserved(self) -> int:
        """Return the most bytes that the allocator had from the device at once, since the last reset."""
        return self.figures().peak_reserved

    def mem_get_info(self) -> tuple[int, int]:
        """Return (free, size) of the device in bytes."""
        figures = self.figures()
        return figures.free, figures.capacity

    def memory_stats(self) -> dict[str, Any]:
        """Return counters by the names of `torch.cuda.memory_stats()`."""
        self._settle()
        return self._device.model.stats()

    def segments(self) -> list[dict[str, Any]]:
        """Return segments and blocks in the form of `torch.cuda.memory_snapshot()`."""
        self._settle()
        return self._device.model.segments()

    def events(self) -> list[tuple[str, int, int, int]]:
        """Return (action, address, bytes, stream) of all that happened, in order; empty unless made with `record=True`."""
        self._settle()
        return list(self._device.events)

    def empty_cache(self) -> None:
        """Give the allocator's cached memory back to the device, as `torch.cuda.empty_cache()` does."""
        self._settle()
        self._device.empty_cache()

    def reset_peak_memory_stats(self) -> None:
        """Let the peaks count from now."""
        self._settle()
        model = self._device.model
        model.peak_allocated, model.peak_reserved = model.allocated, model.reserved

    # --- the history ------------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """Return whether the history is kept."""
        return self._recording

    def record(self, on: bool = True, entries: int = DEFAULT_ENTRIES) -> Recording:
        """Keep the device's history from now on, the last `entries`, or end it and forget it; return the state then.

        Raises:
            NbguardError: `entries` is no number of entries.
        """
        check_entries(entries)
        if on == (self._recording.state == "on"):
            return self._recording
        self._mode.settle()
        self._device.keep_history(SimulatedHistory(entries) if on else None)
        self._recording = Recording("on", entries, cell_now()) if on else Recording("off")
        return replace(self._recording, changed=True)

    def snapshot(self) -> dict[str, Any]:
        """Return segments, settings, and the history where it is kept, in the form of `torch.cuda.memory._snapshot()`."""
        self._settle()
        return self._device.snapshot()

    # --- the whole --------------------------------------------------------------------------------------------------------

    def figures(self) -> Simulated:
        """Return the figures of the device now, as frozen plain data."""
        self._settle()
        model, stats = self._device.model, self._device.stats()
        return Simulated(
            capacity=self._device.capacity,
            context=self._device.context,
            settings=model.settings.conf(),
            torch_version=self._version,
            allocated=stats.allocated,
            reserved=stats.reserved,
            peak_allocated=stats.peak_allocated or 0,
            peak_reserved=stats.peak_reserved or 0,
            free=self._device.free(),
            allocations=model.num_allocs,
            frees=model.num_frees,
            retries=model.num_alloc_retries,
            ooms=model.num_ooms,
            segments=self._segments(),
            unseen=self._mode.unseen,
            broken=self._device.broken,
        )

    def counts(self) -> AllocatorCounts:
        """Return the allocator's counters now, as they are noted before a cell and at a failure."""
        self._settle()
        return self._counts()

    def _counts(self) -> AllocatorCounts:
        model, stats = self._device.model, self._device.stats()
        return AllocatorCounts(
            allocated=stats.allocated,
            reserved=stats.reserved,
            made=model.allocated_so_far,
            made_blocks=model.num_allocs,
            retries=model.num_alloc_retries,
            failures=model.num_ooms,
            collections=full_collections(),
        )

    def reading(self) -> TickReading | None:
        """Return the device's present figures for a sidebar's tick, from any thread, or None if its figures ended."""
        counted = self._device.counted()
        return (
            None
            if counted is None
            else TickReading(tracked=TRACKED, devices=(self._device_facts(*counted, None),), pid=os.getpid())
        )

    def report(self, namespace: dict[str, Any] | None = None) -> Report:
        """Return the report on the holders of the simulated device's memory, as `%gpumem` shows it while it is on.

        Args:
            namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.
        """
        return build_report(Analysis(self.look(namespace)))

    def memory_map(self, request: int | None = None, namespace: dict[str, Any] | None = None) -> MemoryMap:
        """Return the map of the simulated device: segments and blocks, their holders, and pins of free memory.

        Args:
            request: bytes: also find the cheapest way to a request of so many in one piece.
            namespace: as in `report`.
        """
        return build_map(Analysis(self.look(namespace)), request)

    def oom(self, namespace: dict[str, Any] | None = None) -> OomCard | None:
        """Return the card on the last error, or on the one being handled; None if it did not run out of memory."""
        return build_card(Analysis(self.look(namespace)))

    def card(self, facts: Facts) -> OomCard | None:
        """Return the same for a scan that was just made."""
        return build_card(Analysis(self._on_device(facts)))

    def _settle(self) -> None:
        self._mode.settle()
        self._device.settle()

    def look(self, namespace: dict[str, Any] | None = None) -> Facts:
        """Return the facts of a scan of the names, which give the tensors on the device their holders."""
        return self._on_device(scan(Notebook.current(namespace)).facts)

    def _on_device(self, facts: Facts) -> Facts:
        figures = self.figures()
        return on_simulated(facts, self._facts(figures), self._mode.places(), figures)

    def _facts(self, figures: Simulated) -> DeviceFacts:
        stats = AllocatorStats(
            allocated=figures.allocated,
            reserved=figures.reserved,
            peak_allocated=figures.peak_allocated,
            peak_reserved=figures.peak_reserved,
        )
        return self._device_facts(stats, figures.free, figures.segments)

    def _device_facts(self, stats: AllocatorStats, free: int, segments: tuple[Segment, ...] | None) -> DeviceFacts:
        capacity, model = self._device.capacity, self._device.model
        used = capacity - free
        driver = NvmlFacts(capacity, used, (ProcessFact(os.getpid(), used),))
        return DeviceFacts(
            device=DEVICE,
            name=NAME,
            total=capacity,
            free=free,
            allocator=stats,
            segments=segments,
            nvml=driver,
            settings=model.settings.conf(),
            limit=model.cap,
            airbag=self._airbag(),
            airbag_room=self._airbag_room(),
        )

    def _airbag(self) -> AirbagFact | None:
        size = self._device.reserve
        if not size:
            return None
        return AirbagFact(size=size, spilled=self._device.spilled(), segments=self._segments_of_reserve())

    def _airbag_room(self) -> int:
        device = self._device
        is_possible = not (device.reserve or device.obstacle_to_reserve)
        return (host_facts().room or 0) if is_possible else 0

    def _segments(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self._every_segment() if segment.pool != RESERVE)

    def _segments_of_reserve(self) -> tuple[Segment, ...]:
        every = self._every_segment() if self._device.reserve else ()
        return tuple(replace(segment, pool=(0, 0)) for segment in every if segment.pool == RESERVE)

    def _every_segment(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                address=segment["address"],
                total_size=segment["total_size"],
                is_small=segment["segment_type"] == "small",
                is_expandable=segment["is_expandable"],
                blocks=tuple(
                    Block(address=b["address"], size=b["size"], state=b["state"], requested=b["requested_size"])
                    for b in segment["blocks"]
                ),
                stream=segment["stream"],
                pool=tuple(segment["segment_pool_id"]),
            )
            for segment in self._device.model.segments()
        )

    def _refuse(self, failed: SimulatedOutOfMemoryError, _asked: int) -> Exception:
        """Return the error of a request, with the figures of CUDA's, and note the state as it is for a failure there."""
        note = self._note(failed)
        NOTES.append(note)
        free, allocated, besides = map(as_torch_writes, (note.free, note.allocated, note.reserved - note.allocated))
        limit = "" if note.limit is None else f" PyTorch may take {format_bytes(note.limit)} of it."
        return SimulatedCudaOutOfMemoryError(
            f"Simulated CUDA out of memory (nbguard.simulate): tried to allocate {as_torch_writes(note.requested)}; the "
            f"simulated device of {format_bytes(self._device.capacity)} has {free} free.{limit} {allocated} is allocated by "
            f"tensors, and {besides} is reserved by PyTorch's allocator but unallocated. Nothing is short on this machine."
        )

    def _note(self, failed: SimulatedOutOfMemoryError) -> OomNote:
        model, stats = self._device.model, self._device.stats()
        note = OomNote(
            device=DEVICE,
            requested=segment_size(failed.size, model.settings.large_segment),
            total=self._device.capacity,
            free=failed.free or 0,
            limit=model.cap,
            allocated=stats.allocated,
            reserved=stats.reserved,
            peak_allocated=stats.peak_allocated,
            peak_reserved=stats.peak_reserved,
            settings=model.settings.conf(),
            cell=cell_now(),
            time=time.time(),
            counts=self._counts(),
        )
        return with_free_blocks(note, model.num_allocs - model.num_frees, self._segments)


def simulate(
    capacity: str | int,
    settings: str = "",
    *,
    context: str | int = 0,
    fraction: float | None = None,
    torch_version: str | None = None,
    record: bool = False,
) -> Simulation:
    """Return a simulated GPU: code under `with` sees reserved, allocated, fragmentation and out of memory as on a real one.

    The code itself runs on the CPU, and its results do not change. Every CPU tensor that an operation uses counts as on the
    device; differences of a real GPU are not simulated and are named in every report (`sim.figures().assumptions`).

    Args:
        capacity: of the device: "16GiB", or bytes.
        settings: the value of `PYTORCH_ALLOC_CONF`.
        context: bytes that CUDA itself takes of the device; 0 unless given, as it differs from one GPU to the next.
        fraction: of the device that PyTorch may take (`set_per_process_memory_fraction`).
        torch_version: whose allocator is modelled; this PyTorch's own if not given.
        record: keep all requests for `sim.events()`.

    Raises:
        SettingsError: the settings name an unknown key or a value that it cannot have.
        NbguardError: the sizes or the fraction cannot be used.
    """
    size, taken = _size(capacity, "capacity"), _size(context, "context")
    version = torch_version or str(torch.__version__)
    try:
        known = parse_version(version)
    except ValueError as error:
        raise NbguardError(f"torch_version: {error}") from None
    if not size or taken >= size:
        raise NbguardError(
            f"a device of {format_bytes(size)} with a context of {format_bytes(taken)} leaves no memory to simulate"
        )
    if fraction is not None and not 0 < fraction <= 1:
        raise NbguardError(f"fraction is a share of the device above 0 and up to 1, not {fraction}")
    return Simulation(size, AllocatorSettings.parse(settings, known), taken, fraction, version, record=record)


def asked_for_cuda(error: BaseException) -> bool:
    """Return whether PyTorch raised an error because it was asked for CUDA and could not start it."""
    start: Any = getattr(torch.cuda, "_lazy_init", None)
    code = getattr(start, "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False


def _size(value: str | int, name: str) -> int:
    if type(value) is int and 0 <= value < sys.maxsize:
        return value
    if type(value) is str:
        try:
            return gpu_size(value)
        except ValueError as error:
            raise NbguardError(str(error)) from None
    raise NbguardError(f"{name} is a GPU or a size, such as 'T4' or '16GiB', or bytes, not {value!r:.40}")
