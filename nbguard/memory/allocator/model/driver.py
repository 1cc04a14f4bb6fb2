"""The calls that the model makes to the device's driver, and a simulated driver that only counts bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


class Driver(Protocol):
    """The calls that get memory for the allocator and give it back. Sizes and addresses in bytes."""

    def allocate(self, size: int) -> int | None:
        """Return the address of a new segment, or None where there is no room (cudaMalloc)."""

    def release(self, address: int, size: int) -> None:
        """Take a segment back (cudaFree)."""

    def reserve(self, size: int) -> int:
        """Return the start of `size` bytes of address space, with no memory in it."""

    def unreserve(self, address: int, size: int) -> None:
        """Take address space back."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind some pages; False, and nothing is changed, where there is no room."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind some pages back."""

    def free(self) -> int | None:
        """Return the bytes that are left on the device; None if that is not known."""


_FIRST, _LAST = 1 << 41, 1 << 56
_STRIDE, _SLOTS = 1 << 42, 1 << 14


@dataclass(slots=True)
class Addresses:
    """A source of addresses for segments and ranges: each above the one before, each below it, or in no order."""

    order: Literal["ascending", "descending", "scattered"] = "ascending"
    seed: int = 0  # of "scattered": the same seed gives the same addresses
    taken: int = 0  # addresses given so far
    edge: int = 0  # bytes of address space given so far

    def next(self, size: int) -> int:
        """Return the address of the next `size` bytes."""
        span = -(-size // 2**21) * 2**21
        number = self.taken
        self.taken += 1
        address = self.edge
        self.edge += span
        if self.order == "descending":
            return _LAST - self.edge
        if self.order == "scattered" and number < _SLOTS:
            odd = (self.seed * 2 + 1) * 2_654_435_761 | 1  # coprime to the number of slots, so that each is used once
            address += (number * odd + self.seed) % _SLOTS * _STRIDE
        return _FIRST + address


class SimulatedDriver:
    """A device that counts the bytes taken and makes up addresses.

    Args:
        capacity: bytes that the allocator can have in all; None for a device without end.
        given: addresses of the first segments and ranges, in the order of the requests for them.
        addresses: the source of all further addresses; ascending by default.
        used: bytes that are taken already.
    """

    def __init__(
        self, capacity: int | None = None, given: Iterable[int] = (), addresses: Addresses | None = None, used: int = 0
    ) -> None:
        self.capacity = capacity
        self.used: int = used
        self.calls: int = 0
        self.given: list[int] = list(given)[::-1]
        self.addresses: Addresses = addresses or Addresses()

    def allocate(self, size: int) -> int | None:  # noqa: D102
        self.calls += 1
        return self.reserve(size) if self._take(size) else None

    def release(self, address: int, size: int) -> None:  # noqa: ARG002, D102
        self.calls += 1
        self.used -= size

    def reserve(self, size: int) -> int:  # noqa: D102
        return self.given.pop() if self.given else self.addresses.next(size)

    def unreserve(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002, D102
        self.calls += 1
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002, D102
        self.calls += 1
        self.used -= size

    def free(self) -> int | None:  # noqa: D102
        return None if self.capacity is None else self.capacity - self.used

    def _take(self, size: int) -> bool:
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True


class Range:
    """The address space of one expandable segment, mapped page by page."""

    __slots__ = ("base", "counter", "page", "size")

    def __init__(self, base: int, size: int, page: int, counter: int) -> None:
        self.base: int = base  # first address
        self.size: int = size  # bytes, mapped or not
        self.page: int = page  # bytes of a page: 2 MiB for small blocks, the large segment size for large ones
        self.counter: int = counter  # number of the segment in the order of making; 0 where addresses decide
