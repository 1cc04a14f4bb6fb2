"""The constants and formulas of PyTorch's caching allocator, from rounding to the order of free blocks.

They hold for torch 2.1 to 2.15; where versions differ, the version decides, never the file at hand. Sizes in bytes.
"""

from __future__ import annotations

import re
from typing import Literal

MIN_BLOCK = 512
"""Every block is a multiple of this many bytes (`kMinBlockSize`)."""

SMALL_MAX = 1024**2
"""A rounded request of at most this many bytes is served by the small pool (`kSmallSize`)."""

SMALL_SEGMENT = 2 * 1024**2
"""Bytes of a segment of the small pool, and of a page of its expandable segments (`kSmallBuffer`)."""

MIN_LARGE = 10 * 1024**2
"""A request from this size on gets a segment of its own size; smaller ones share a large segment (`kMinLargeAlloc`)."""

ROUND_LARGE = 2 * 1024**2
"""A segment of a request's own size is a multiple of this many bytes (`kRoundLarge`)."""

LARGE_SEGMENT = 20 * 1024**2
"""The default large segment size; also a page of an expandable segment of the large pool (`kLargeBuffer`)."""

DIVISION_ENTRIES = 16
"""Entries of the table of `roundup_power2_divisions`: one for each power of two from 1 MiB up."""

NO_DIVISIONS = (0,) * DIVISION_ENTRIES

PoolId = tuple[int, int]
"""(0, 0) for the default pool, (n, 0) for a pool of CUDA graphs, (0, n) for a MemPool (torch's `MempoolId_t`)."""

DEFAULT_POOL: PoolId = (0, 0)

TieBreak = Literal["address", "block", "segment"]
"""The order of free blocks of one stream and size: by address, by age of the block object, or by age of the segment."""

NEWEST = (2, 15)
"""The newest version whose rules were compared with the binaries."""


def parse_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as `2.13.0+cu130`. Raises ValueError if it is none."""
    match = re.match(r"\s*v?(\d{1,4})\.(\d{1,4})(?!\d)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a PyTorch version; write it as 2.13 or 2.13.0")
    return int(match[1]), int(match[2])


def tie_break(version: tuple[int, int]) -> TieBreak:
    """Return the order of free blocks of equal size in a version of torch."""
    if version < (2, 12):
        return "address"
    return "block" if version < (2, 13) else "segment"


def round_size(size: int, divisions: tuple[int, ...] = NO_DIVISIONS) -> int:
    """Return the size of the block that serves a request of `size` bytes, without a rest that is not split off (`round_size`).

    Args:
        size: bytes asked for, at least 1.
        divisions: by size class, the number of steps between one power of two and the next
            (`roundup_power2_divisions`); 0 and 1 mean multiples of 512 bytes.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    count = divisions[min(max(size.bit_length() - 21, 0), DIVISION_ENTRIES - 1)]
    if count <= 1 or size <= MIN_BLOCK * count:
        return -(-size // MIN_BLOCK) * MIN_BLOCK
    power = 1 << (size.bit_length() - 1)
    if power == size:
        return size
    step = power >> (count.bit_length() - 1)
    return -(-size // step) * step if step else 2 * power


def segment_size(rounded: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes asked of the driver for a rounded request that no free block serves (`get_allocation_size`)."""
    if rounded <= SMALL_MAX:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return large_segment
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def range_size(total: int | None, page: int) -> int:
    """Return the bytes of address space of one expandable segment: 9/8 of the device, in whole pages.

    A device of unknown size counts as one of 256 GiB: it matters only where one pool and stream have several ranges.
    """
    total = 2**38 if total is None else total
    return -(-(total + total // 8) // page) * page
