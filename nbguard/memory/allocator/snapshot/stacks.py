"""The different stacks of a snapshot, each frame kept once and each stack as the numbers of its frames."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

Frame = tuple[str, int, str]
"""(file, line, function)."""

Stack = tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Stacks(Sequence[Stack]):
    """A sequence of stacks that makes each one when it is asked for: most of a large snapshot's are never shown."""

    frames: tuple[Frame, ...] = ()  # each different frame once
    # Indices in `frames` of the frames of all stacks, innermost first, one stack after another.
    numbers: array[int] = field(default_factory=lambda: array("I"))
    # Of each stack, the end of its part of `numbers`.
    ends: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Stack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stack]: ...
    def __getitem__(self, index: int | slice) -> Stack | Sequence[Stack]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start = self.ends[at - 1] if at else 0
        return tuple([self.frames[number] for number in self.numbers[start : self.ends[at]]])

    def with_frames(self, change: Callable[[Frame], Frame]) -> Stacks:
        """Return the same stacks with each frame replaced by the result of `change`."""
        return Stacks(tuple(map(change, self.frames)), self.numbers, self.ends)
