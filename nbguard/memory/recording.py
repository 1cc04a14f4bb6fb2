"""The recording of PyTorch's allocator history: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.render.result import Result

DEFAULT_ENTRIES = 100_000
"""Entries that a history keeps of each device, the latest."""

ENTRY_BYTES = 270
"""Host memory that an entry takes, as `tests/benchmarks/recording.py` measures it on the fake device."""

State = Literal["on", "waiting", "theirs", "off"]


@dataclass(frozen=True, slots=True)
class Recording(Result):
    """The state of the allocator's recorded history.

    `state`: `on` by nbguard; `waiting` for the first use of CUDA; `theirs`: by someone else, whose settings are not known;
    `off`. `entries` is how many of each device are kept at most, `since` the number of the cell or None, `changed` whether
    the call that returned this has changed anything.
    """

    kind: ClassVar[str] = "recording"
    view: ClassVar[str] = "nbguard.memory.views.recording:recording_blocks"

    state: State
    entries: int | None = None
    since: int | None = None
    changed: bool = False
