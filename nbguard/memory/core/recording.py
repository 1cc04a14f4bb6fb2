"""The recording of PyTorch's allocator history, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.errors import NbguardError
from nbguard.memory.core import advice
from nbguard.render.result import Result

DEFAULT_ENTRIES = 100_000
"""Entries that a history keeps of each device, the latest."""
ENTRY_BYTES = 270
"""Host memory that an entry takes, as `tests/benchmarks/recording.py` measures it on the fake device."""
State = Literal["on", "waiting", "theirs", "off"]


@dataclass(frozen=True, slots=True)
class Recording(Result):
    """The state of the allocator's recorded history."""

    kind: ClassVar[str] = "recording"
    view: ClassVar[str] = "nbguard.memory.core.device_view:recording_blocks"

    state: State  # `on` by nbguard, `waiting` for CUDA, `theirs` by someone else, or `off`
    entries: int | None = None  # kept of each device at most; None if unknown
    since: int | None = None  # number of the cell that it began in; None if unknown
    changed: bool = False  # the call that returned this has changed something

    def check_history(self) -> None:
        """Raise NbguardError if there is no history. The message says how to record one."""
        if self.state == "off":
            raise NbguardError(
                "no history is recorded: run  " + advice.RECORD_ON.command + " , then the cells in question, then this again"
                " (--file FILE takes a snapshot that has one)"
            )
        if self.state == "waiting":
            raise NbguardError("recording begins with the first use of CUDA; run your cells first")


def check_entries(entries: int) -> None:
    """Raise NbguardError if a history cannot keep so many entries."""
    if not 1 <= entries <= 10_000_000:
        raise NbguardError(f"{entries} entries cannot be kept: give 1 to 10,000,000 (each takes some {ENTRY_BYTES} bytes)")
