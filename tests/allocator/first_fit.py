"""A driver that gives addresses again that went back."""

from __future__ import annotations

from nbguard.memory.allocator.model.driver import SimulatedDriver


class FirstFit(SimulatedDriver):
    """Puts segments and ranges at the first place from a fixed base where they fit, like the fake device."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.taken: list[tuple[int, int]] = []

    def reserve(self, size: int) -> int:
        length, at = -(-size // 2**21) * 2**21, 0x500000000000
        for start, end in self.taken:
            if start >= at + length:
                break
            at = max(at, end)
        self.taken = sorted([*self.taken, (at, at + length)])
        return at

    def release(self, address: int, size: int) -> None:
        super().release(address, size)
        self.unreserve(address, size)

    def unreserve(self, address: int, size: int) -> None:
        self.taken = [each for each in self.taken if each[0] != address]
