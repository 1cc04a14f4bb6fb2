"""Devices on which room is made, PyTorch's own ones and a simulated one, and the steps that differ between them."""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from nbguard.memory.cleanup.apply.kept_by_torch import empty_cache
from nbguard.memory.cleanup.apply.parking import refuse_without_host_memory, wait_for_device
from nbguard.memory.core.facts import Segment
from nbguard.memory.room.host_reserve import HostReserve, refuse_reserve
from nbguard.memory.scan.devices.cuda import tracked_device
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.memory.scan.parked import SimulatedMemory
from nbguard.memory.scan.scan import Notebook, Scan, scan


@dataclass(eq=False, repr=False, slots=True)
class Traveller:
    """A storage that moves."""

    storage: Any  # a torch.UntypedStorage
    stream: int  # address of its block's stream; 0 is the default stream
    host: Any = None  # its bytes on the host, from before it leaves until all are back
    is_back: bool = False  # after it has left, its bytes are on the device again


class SetAside(Protocol):
    """Memory that an allocator falls back to where its device has no room."""

    def spilled(self) -> int:
        """Return the bytes that lie in it, from any thread."""

    def segments(self) -> tuple[Segment, ...]:
        """Return its segments."""

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that the allocator had in tensors and reserved at once, with those set aside."""

    def is_limited(self) -> bool:
        """Say whether a memory fraction is set; then the allocator falls back for every request."""

    def end(self) -> None:
        """Give it back. Nothing may lie in it."""


class RoomDevice:
    """A device of PyTorch's whose allocator tells nothing, as of MPS or the host; classes of others know more."""

    home: SimulatedMemory | None = None  # the memory that its tensors are in besides, where it is simulated

    def __init__(self, name: str) -> None:
        self.name = name  # `cuda:0`

    def look(self, notebook: Notebook) -> Scan:
        """Return a scan of the notebook that knows the tensors on this device."""
        return scan(notebook, tensors=True)

    def seen_in(self, scanned: Scan, notebook: Notebook) -> Scan:
        """Return a scan that has just been made as one of this device."""
        del notebook
        return scanned

    def allocated(self) -> int | None:
        """Return the bytes in tensors; None where no allocator counts them."""
        return None

    def reserved(self) -> int:
        """Return the bytes that the allocator has from the device."""
        return 0

    def room(self) -> int:
        """Return the bytes that it has for tensors at most, free or in the cache."""
        return sys.maxsize

    def empty_cache(self) -> None:
        """Give the allocator's free segments back."""
        empty_cache()

    def clear_workspaces(self) -> None:
        """Have libraries give back the memory that they make again."""

    def default_stream(self) -> AbstractContextManager[Any]:
        """Return a context for memory of the default stream; when it ends, all streams may use that."""
        return nullcontext()

    def key(self, storage: Any) -> tuple[str, int]:
        """Return the name of the device and the address of a storage, as a scan has them."""
        return str(storage.device), storage.data_ptr()

    @property
    def is_capturing(self) -> bool:
        """Say whether a CUDA graph is being captured on it."""
        return False


class MovingDevice(RoomDevice):
    """A device whose storages move out and back one by one."""

    stream = 0  # address of the current stream; 0 is the default stream

    @abstractmethod
    def place(self, storage: Any) -> int | None:
        """Return the address of a storage that may move; None for another."""

    @abstractmethod
    def prepare(self, travellers: Sequence[Traveller]) -> None:
        """Wait until nothing uses the storages any more.

        Raises:
            NbguardError: the host has no room for their bytes.
        """

    @abstractmethod
    def copy(self, traveller: Traveller) -> None:
        """Copy the bytes of a storage to the host."""

    @abstractmethod
    def leave(self, traveller: Traveller) -> None:
        """Free the memory of a storage."""

    @abstractmethod
    def come_back(self, traveller: Traveller) -> None:
        """Give a storage memory again, and its bytes; the device's own error where there is no room."""

    @abstractmethod
    def take(self, nbytes: int) -> Any:
        """Return an object that holds so many bytes in one piece, and frees them when it goes."""

    @abstractmethod
    def refuse_reserve(self, size: int) -> None:
        """Raise NbguardError where its allocator could not fall back to so many bytes of host memory."""

    @abstractmethod
    def set_aside(self, size: int) -> SetAside:
        """Return host memory that its allocator falls back to from now on; NbguardError where there is none."""


class CudaDevice(MovingDevice):
    """A CUDA device."""

    def __init__(self, index: int) -> None:
        super().__init__(f"cuda:{index}")
        self.index = index
        self._torch: Any = sys.modules["torch"]

    @property
    def stream(self) -> int:  # type: ignore[override]
        """Return the address of the stream that is current."""
        return int(self._torch.cuda.current_stream(self.index).cuda_stream)

    @property
    def is_capturing(self) -> bool:  # noqa: D102
        return bool(self._torch.cuda.is_current_stream_capturing())

    def allocated(self) -> int:  # noqa: D102
        return int(self._torch.cuda.memory_allocated(self.index))

    def reserved(self) -> int:  # noqa: D102
        return int(self._torch.cuda.memory_reserved(self.index))

    def room(self) -> int:  # noqa: D102
        stats = device_counters(self.index)
        cached = stats["reserved_bytes"]["all"]["current"] - stats["active_bytes"]["all"]["current"] if stats else 0
        return int(self._torch.cuda.mem_get_info(self.index)[0]) + int(cached)

    def empty_cache(self) -> None:  # noqa: D102
        self._torch.cuda.empty_cache()

    def place(self, storage: Any) -> int | None:  # noqa: D102
        return int(storage.data_ptr()) if storage.resizable() else None

    def prepare(self, travellers: Sequence[Traveller]) -> None:  # noqa: D102
        refuse_without_host_memory(sum(traveller.storage.nbytes() for traveller in travellers))
        wait_for_device()

    def copy(self, traveller: Traveller) -> None:  # noqa: D102
        traveller.host = self._torch.UntypedStorage(traveller.storage.nbytes(), device="cpu").copy_(traveller.storage)

    def leave(self, traveller: Traveller) -> None:  # noqa: D102
        traveller.storage.resize_(0)

    def come_back(self, traveller: Traveller) -> None:  # noqa: D102
        with self.on_stream(traveller.stream):
            traveller.storage.resize_(traveller.host.nbytes())
        traveller.storage.copy_(traveller.host)

    def take(self, nbytes: int) -> Any:  # noqa: D102
        return self._torch.UntypedStorage(nbytes, device=self.name)

    def refuse_reserve(self, size: int) -> None:  # noqa: D102
        refuse_reserve(self.index, size)

    def set_aside(self, size: int) -> SetAside:  # noqa: D102
        return HostReserve(self.index, size)

    def clear_workspaces(self) -> None:  # noqa: D102
        clear = getattr(self._torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Let memory that is allocated belong to a stream, by its address; 0 is the default one."""
        cuda = self._torch.cuda
        with cuda.stream(cuda.ExternalStream(stream, device=self.name) if stream else cuda.default_stream(self.name)):
            yield

    @contextmanager
    def default_stream(self) -> Iterator[None]:  # noqa: D102
        with self.on_stream(0):  # a block belongs to the stream that it is allocated on
            yield
        self._torch.cuda.synchronize(self.index)


_SIMULATED: list[tuple[int, MovingDevice]] = []
"""(thread, device) of the simulated devices on which code runs now."""


def note_simulated(device: MovingDevice, *, is_on: bool) -> None:
    """Have the code of this thread that follows run on a simulated device, or no longer."""
    here = threading.get_ident(), device
    if is_on:
        _SIMULATED.append(here)
    else:
        _SIMULATED[:] = [each for each in _SIMULATED if each != here]


def simulated_now() -> MovingDevice | None:
    """Return the simulated device on which the code of this thread runs, if any."""
    thread = threading.get_ident()
    return next((device for owner, device in reversed(_SIMULATED) if owner == thread), None)


def device_now() -> RoomDevice:
    """Return the device on which the code of this thread allocates its tensors."""
    simulated = simulated_now()
    if simulated is not None:
        return simulated
    kind = tracked_device()
    if kind == "cuda":
        return CudaDevice(sys.modules["torch"].cuda.current_device())
    return RoomDevice(kind if kind == "cpu" else f"{kind}:0")
