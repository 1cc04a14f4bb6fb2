"""The airbag's reserve of a CUDA device, a `torch.cuda.MemPool` with `use_on_oom` over managed memory that stays with the host.

The device can use it where it lies. Python runs while the reserve is made and never when PyTorch falls back to it or frees it,
because it holds the allocator's lock then.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.parking import refuse_without_host_memory
from nbguard.memory.core.facts import Segment
from nbguard.memory.scan.devices.cuda import allocator_settings, memory_fraction
from nbguard.memory.scan.devices.reserve import Reserve, airbag_of, note_reserve, obstacle, small_part, spilled_now
from nbguard.memory.scan.parked import plain_torch
from nbguard.units import MiB, format_bytes

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
