"""Devices on which room is made, PyTorch's own ones and a simulated one, and the steps that differ between them."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.kept_by_torch import empty_cache
from nbguard.memory.cleanup.apply.parking import refuse_without_host_memory, wait_for_device
from nbguard.memory.core.facts import Segment
from nbguard.memory.scan.devices.cuda import allocator_settings, memory_fraction, tracked_device
from nbguard.memory.scan.devices.reserve import (
    Reserve,
    airbag_of,
    device_counters,
    note_reserve,
    obstacle,
    small_part,
    spilled_now,
)
from nbguard.memory.scan.parked import SimulatedMemory, plain_torch
from nbguard.memory.scan.scan import Notebook, Scan, scan
from nbguard.units import MiB, format_bytes

# --- The airbag's reserve of a CUDA device, a `torch.cuda.MemPool` with `use_on_oom` over managed memory of the host.
#
# The device can use it where it lies. Python runs while the reserve is made, and never when PyTorch falls back to it or frees
# it, because it holds the allocator's lock then.


_ATTACH_GLOBAL, _PREFER, _ACCESSED_BY, _CPU, _CONCURRENT = 1, 3, 5, -1, 89
"""Numbers of CUDA's driver for CU_MEM_ATTACH_GLOBAL, CU_MEM_ADVISE_SET_PREFERRED_LOCATION and _ACCESSED_BY, CU_DEVICE_CPU,
CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS."""
_ERRORS_ONLY = 2
_LONG = 1.0
"""Seconds, longer than it takes to make the reserve."""
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class HostReserve:
    """Host memory that PyTorch's allocator falls back to where a CUDA device is full.

    Attributes:
        pool: torch's MemPool; None after `end`.
    """

    def __init__(self, index: int, size: int) -> None:
        """Set `size` bytes aside for the CUDA device `index`.

        Raises:
            NbguardError: the driver does not give them; nothing was changed.
        """
        torch: Any = sys.modules["torch"]
        self._index, self._size = index, size
        self._address = _host_memory(index, size)
        self.pool: Any
        self._functions: Any  # that the pool calls: they must live as long
        try:
            self.pool, self._functions = _filled_pool(torch, index, self._address, size)
        except BaseException:
            _driver().cuMemFree_v2(ctypes.c_uint64(self._address))
            raise
        self._log_level = _quieten()  # PyTorch's own before; None: this PyTorch has none to set
        note_reserve(Reserve(pool=tuple(self.pool.id), index=index, size=size))

    def spilled(self) -> int:
        """Return the bytes that lie in it, in 15 µs, from any thread."""
        return spilled_now()

    def segments(self) -> tuple[Segment, ...]:
        """Return its segments."""
        fact = airbag_of(self._index)
        return () if fact is None else fact.segments

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that the allocator had in tensors and reserved at once, with those set aside."""
        stats: Any = sys.modules["torch"].cuda.memory_stats_as_nested_dict(self._index)
        return stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"]

    def is_limited(self) -> bool:
        """Say whether a memory fraction is set; PyTorch falls back for every request then."""
        return (memory_fraction(self._index) or 1.0) < 1

    def end(self) -> None:
        """Give it back. Nothing may lie in it."""
        note_reserve(None)
        self.pool = None  # torch gives its segments back
        sys.modules["torch"].cuda.reset_peak_memory_stats(self._index)  # they have the reserve's bytes
        _driver().cuMemFree_v2(ctypes.c_uint64(self._address))
        flag = _log_flag()
        if flag is not None and self._log_level is not None:
            flag.value = self._log_level


def refuse_reserve(index: int, size: int) -> None:
    """Raise NbguardError where PyTorch or the system has no use for such a reserve, or could not keep its promise."""
    if reason := obstacle(allocator_settings(), memory_fraction(index), index):
        raise NbguardError(reason)
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        raise NbguardError("no airbag can be made or used while a CUDA graph is captured")
    refuse_without_host_memory(size)


def _host_memory(index: int, size: int) -> int:
    """Return the address of managed memory that stays with the host and that the device uses where it lies."""
    driver, address, can = _driver(), ctypes.c_uint64(), ctypes.c_int()
    sys.modules["torch"].cuda.synchronize(index)  # makes the device's context this thread's
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetAttribute(ctypes.byref(can), _CONCURRENT, device)
    if not can.value:
        raise NbguardError(f"cuda:{index} cannot use managed memory while the host does, so it can have no airbag")
    if error := driver.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(size), _ATTACH_GLOBAL):
        raise NbguardError(f"CUDA's driver gives no {format_bytes(size)} of managed memory (error {error})")
    for advised, whom in ((_PREFER, _CPU), (_ACCESSED_BY, device.value)):
        driver.cuMemAdvise(address, ctypes.c_size_t(size), advised, whom)
    return address.value


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _filled_pool(torch: Any, index: int, address: int, size: int) -> tuple[Any, Any]:
    """Return a pool whose segments are all made, so that PyTorch takes free blocks of them and asks for no more.

    With it the functions that it calls.
    """
    given = 0

    def allocate(nbytes: int, _device: int, _stream: int | None) -> int | None:
        nonlocal given
        if given + nbytes > size:
            return None
        given += nbytes
        return address + given - nbytes

    called = _ALLOCATE(allocate)
    # Freed is all at once, with the airbag. PyTorch holds its lock when it calls this: it may be nothing of Python's.
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    allocator = torch._C._cuda_customAllocator(ctypes.cast(called, ctypes.c_void_p).value, nothing)
    small = small_part(size)
    with (
        _undisturbed(),
        plain_torch(),
        torch.cuda.device(index),
        torch.cuda.stream(torch.cuda.default_stream(index)),
    ):
        # A storage is made without giving Python's lock away, unlike a tensor. PyTorch keeps blocks by stream, so that the
        # requests of no other can be served.
        pool = torch.cuda.MemPool(allocator, use_on_oom=True)
        with torch.cuda.use_mem_pool(pool):
            taken = [torch.UntypedStorage(MiB, device=f"cuda:{index}") for _ in range(small // MiB)]
            taken.append(torch.UntypedStorage(size - small, device=f"cuda:{index}"))
        del taken
    torch.cuda.reset_peak_memory_stats(index)  # the reserve was allocated for a moment: its bytes are no peak of the user's
    return pool, (allocator, called)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have no other thread of Python's take its lock meanwhile, as one that reads a counter would wait for PyTorch's lock.

    PyTorch holds that while it calls `allocate`, which would wait for Python's. A thread asks for Python's lock when it has
    waited as long as the interval says; after the sleep all that wait go by the new one.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG)
    try:
        time.sleep(4 * interval)
        yield
    finally:
        sys.setswitchinterval(interval)


def _quieten() -> int | None:
    """Have PyTorch's C++ write errors only to standard error; return its level before, or None if it cannot be set.

    It writes a warning for each request that falls back, and a notebook would show them all.
    """
    flag = _log_flag()
    if flag is None:
        return None
    former = flag.value
    flag.value = max(former, _ERRORS_ONLY)
    return former


def _log_flag() -> ctypes.c_int | None:
    """Return the lowest level that PyTorch's C++ writes to standard error, to be set; None where it has no such."""
    library = Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


# --- The devices.


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
