"""One thing that stands out, in one sentence, and the limit below which things are too small for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.errors import NbguardError
from nbguard.memory.core.advice import NONE, Advice
from nbguard.render.result import Result
from nbguard.units import MiB

# --- The recording of PyTorch's allocator history, as plain data.


DEFAULT_ENTRIES = 100_000
"""Entries that a history keeps of each device, the latest."""

ENTRY_BYTES = 270
"""Host memory that an entry takes, as `tests/benchmarks/recording.py` measures it on the fake device."""

State = Literal["on", "waiting", "theirs", "off"]


@dataclass(frozen=True, slots=True)
class Recording(Result):
    """The state of the allocator's recorded history."""

    kind: ClassVar[str] = "recording"
    view: ClassVar[str] = "nbguard.memory.core.views.device:recording_blocks"

    state: State  # `on` by nbguard, `waiting` for CUDA, `theirs` by someone else, or `off`
    entries: int | None = None  # kept of each device at most; None if unknown
    since: int | None = None  # number of the cell that it began in; None if unknown
    changed: bool = False  # the call that returned this has changed something


def check_entries(entries: int) -> None:
    """Raise NbguardError if a history cannot keep so many entries."""
    if not 1 <= entries <= 10_000_000:
        raise NbguardError(f"{entries} entries cannot be kept: give 1 to 10,000,000 (each takes some {ENTRY_BYTES} bytes)")


# --- The limit below which things are too small to be shown as rows, findings, badges, buttons or in a sentence.


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
