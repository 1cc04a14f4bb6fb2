"""One thing that stands out, in one sentence, and the limit below which things are too small for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nbguard.memory.core.advice import NONE, Advice
from nbguard.units import MiB

_PART = 100
"""Holders of less than this share of the held bytes are small."""
_TOGETHER = 10
"""unless they have more than this part of it together: then one line for all would hide where the memory is."""


def least_shown(held: int) -> int:
    """Return the least bytes of a thing with its own row, finding or button, where `held` bytes are held in all.

    1 MiB, or a hundredth of the held bytes if that is more.
    """
    return max(MiB, held // _PART)


def least_of_rows(sizes: Iterable[int]) -> int:
    """Return the least bytes of a row among these that is shown by itself."""
    rows = list(sizes)
    held = sum(rows)
    least = least_shown(held)
    return MiB if sum(size for size in rows if size < least) > held // _TOGETHER else least


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the user, and the commands that act on it. Code stands between backticks."""

    kind: str
    sentence: str
    advice: Advice = NONE
    learner: str = ""  # the Learner that it is about as long as no fit runs on it; empty if it holds whatever runs

    @property
    def command(self) -> str:
        """Return the line that acts on it, which stands in the sentence; empty where there is none."""
        return self.advice.command
