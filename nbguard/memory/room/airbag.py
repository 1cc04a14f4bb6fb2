"""The airbag, host memory that PyTorch's allocator falls back to where it would raise that a device is out of memory.

It is a `torch.cuda.MemPool` with `use_on_oom` over managed memory that stays with the host and that the device can use. The
kernels are the same in the same order, only slower on that memory, so the results are the same to the bit. Python runs
while the reserve is made and never when PyTorch falls back to it or frees it, because it holds the allocator's lock then.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError, NoTorchError
from nbguard.memory.cleanup.apply.parking import refuse_without_host_memory
from nbguard.memory.core import advice
from nbguard.memory.core.facts import PoolId
from nbguard.memory.scan.devices.cuda import allocator_settings, memory_fraction, tracked_device
from nbguard.memory.scan.devices.reserve import Reserve, airbag_of, note_reserve, obstacle, spilled_now
from nbguard.memory.scan.parked import plain_torch
from nbguard.units import MiB, format_bytes

_SEGMENT = 2 * MiB
"""The driver's page; PyTorch asks for whole ones."""
_SMALL_SHARE, _MOST_SMALL = 4, 64 * MiB
"""PyTorch serves requests of up to 1 MiB from segments of their own, a quarter of the reserve, and so much at
most: each is one more to look at."""
_LEAST = 64 * MiB
_ATTACH_GLOBAL, _PREFER, _ACCESSED_BY, _CPU, _CONCURRENT = 1, 3, 5, -1, 89
"""Numbers of CUDA's driver for CU_MEM_ATTACH_GLOBAL, CU_MEM_ADVISE_SET_PREFERRED_LOCATION and _ACCESSED_BY, CU_DEVICE_CPU,
CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS."""
_ERRORS_ONLY = 2
_LONG = 1.0
"""Seconds, longer than it takes to make the reserve."""
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(eq=False, kw_only=True)
class Airbag:
    """The airbag that is on."""

    index: int  # of the CUDA device
    size: int  # bytes of host memory
    address: int  # where they begin
    pool: Any  # torch's MemPool; None once it is off
    allocator: tuple[Any, ...]  # what the pool calls: it must live as long
    log_level: int | None  # PyTorch's own before; None: this PyTorch has none to set
    most: int = 0  # bytes seen in it at once
    vain: tuple[int, int] = (0, 0)  # (bytes in it, room on the device) at the last move that brought nothing back

    @property
    def device(self) -> str:
        """Return the device that it stands in for."""
        return f"cuda:{self.index}"

    @property
    def pool_id(self) -> PoolId:
        """Return torch's number of its pool."""
        return tuple(self.pool.id)

    @property
    def spilled(self) -> int:
        """Return the bytes that lie in it now, in 15 µs, from any thread."""
        nbytes = spilled_now()
        self.most = max(self.most, nbytes)
        return nbytes

    @property
    def smallest(self) -> int:
        """Return the bytes of the smallest block that lies in it, 0 if none does."""
        fact = airbag_of(self.index)
        blocks = (block for segment in (() if fact is None else fact.segments) for block in segment.blocks)
        return min((block.size for block in blocks if block.state != "inactive"), default=0)

    @property
    def spilled_at_least(self) -> int:
        """Return the bytes that lay in it at once, at least, when the allocator's peak was reached.

        Bytes allocated then beyond the most that the device ever had reserved lay outside of it.
        """
        peak, reserved = self._peaks()
        return max(0, peak - (reserved - self.size))

    @property
    def peak(self) -> int:
        """Return the allocator's own peak, with the bytes in the airbag."""
        return self._peaks()[0]

    def _peaks(self) -> tuple[int, int]:
        stats: Any = sys.modules["torch"].cuda.memory_stats_as_nested_dict(self.index)
        return stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"]

    @property
    def is_limited(self) -> bool:
        """Say whether a memory fraction has been set since it is on, as PyTorch then spills all that it allocates."""
        return (memory_fraction(self.index) or 1.0) < 1


_ON: list[Airbag] = []


def airbag_now() -> Airbag | None:
    """Return the airbag that is on, if any."""
    return _ON[0] if _ON else None


def inflate(nbytes: int) -> Airbag:
    """Set `nbytes` of host memory aside for the current CUDA device, in the place of an earlier reserve.

    Raises:
        NbguardError: it cannot be done here; nothing was changed.
        NoTorchError: PyTorch is not imported yet.
    """
    if "torch" not in sys.modules:
        raise NoTorchError
    torch: Any = sys.modules["torch"]
    size = -(-nbytes // _SEGMENT) * _SEGMENT
    _refuse(torch, size)
    deflate()
    index = torch.cuda.current_device()
    address = _host_memory(index, size)
    try:
        on = _reserve(torch, index, address, size)
    except BaseException:
        _driver().cuMemFree_v2(ctypes.c_uint64(address))
        raise
    _ON.append(on)
    note_reserve(Reserve(pool=on.pool_id, index=index, size=size))
    return on


def deflate() -> bool:
    """Give the host memory back; return whether there was an airbag.

    Raises:
        NbguardError: tensors lie in it; it stays.
    """
    if not _ON:
        return False
    on = _ON[0]
    if spilled := on.spilled:
        raise NbguardError(
            f"{format_bytes(spilled)} of tensors lie in the airbag, and {on.device} has no room for them: free some first ("
            + advice.REPORT.command
            + " shows what holds it)"
        )
    _ON.clear()
    note_reserve(None)
    on.pool = None  # torch gives its segments back
    _driver().cuMemFree_v2(ctypes.c_uint64(on.address))
    flag = _log_flag()
    if flag is not None and on.log_level is not None:
        flag.value = on.log_level
    return True


def _refuse(torch: Any, size: int) -> None:
    """Raise NbguardError where PyTorch or the system has no use for an airbag, or could not keep its promise."""
    index = torch.cuda.current_device() if tracked_device() == "cuda" else None
    if reason := obstacle(allocator_settings(), None if index is None else memory_fraction(index), index or 0):
        raise NbguardError(reason)
    if index is None:
        raise NbguardError("an airbag stands in for a CUDA device of NVIDIA's, and PyTorch has none here")
    if size < _LEAST:
        raise NbguardError(f"an airbag takes {format_bytes(_LEAST)} or more, as in  " + advice.airbag().command)
    if torch.cuda.is_current_stream_capturing():
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


def _reserve(torch: Any, index: int, address: int, size: int) -> Airbag:
    """Return an airbag whose segments are all made, so that PyTorch takes free blocks of them and asks for no more."""
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
    small = min(size // _SMALL_SHARE, _MOST_SMALL) // _SEGMENT * _SEGMENT
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
    return Airbag(
        index=index,
        size=size,
        address=address,
        pool=pool,
        allocator=(allocator, called),
        log_level=_quieten(),
    )


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
