"""What a quick start left behind: plain data that goes from the process that ran it to the table, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

LEAST = 64 * 1024
"""Bytes from which on memory that stays is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A row of nbguard's report that was not there before the quick start."""

    label: str
    kind: str
    nbytes: int
    path: str  # the way from the holder to its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A line that nbguard printed, followed: the bytes that it promised, and those that came back."""

    line: str
    promised: int | None
    freed: int
    error: str = ""  # class of the error that it raised

    @property
    def is_kept(self) -> bool:
        """Return whether it did what it said."""
        return not self.error and (self.promised is None or abs(self.promised - self.freed) < LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One quick start: its bytes before and after `del`, counted without nbguard, and what nbguard says about the rest."""

    name: str
    package: str  # as pip names it
    version: str = ""  # empty where it is not installed
    made: int = 0  # bytes of tensors alive at the end of the quick start
    left: int = 0  # of these, after `del` of its names and a collection
    left_twice: int | None = None  # after the same once more; None where that failed
    release: WayOut | None = None  # then `nbguard.release(everything=True)` freed what the names hold
    names: tuple[str, ...] = ()  # names that it bound, which were deleted
    alive: tuple[tuple[str, str], ...] = ()  # (name, class) of those whose objects are alive nevertheless
    held: tuple[Held, ...] = ()  # the largest first
    sentences: tuple[str, ...] = ()  # nbguard's findings on them
    ways: tuple[WayOut, ...] = ()
    rest: int = 0  # bytes left after the ways out
    trace: tuple[str, ...] = ()  # referrers of the largest tensor that is left, found by `gc`
    seconds: float = 0.0
    error: str = ""  # why it did not run to its end

    @property
    def leaks(self) -> bool:
        """Return whether so much is left that it is looked at."""
        return self.left >= LEAST

    @property
    def grows(self) -> bool:
        """Return whether the same once more left as much again."""
        return self.left_twice is not None and self.left_twice - self.left >= LEAST

    @property
    def is_known(self) -> bool:
        """Return whether nbguard says that the library is known for it."""
        return any("known: " in sentence for sentence in self.sentences)

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Outcome:
    """Return the outcome that a line of JSON has."""
    fields: dict[str, Any] = json.loads(text)
    fields["held"] = tuple(Held(**each) for each in fields["held"])
    fields["ways"] = tuple(WayOut(**each) for each in fields["ways"])
    fields["release"] = fields["release"] and WayOut(**fields["release"])
    fields["alive"] = tuple((name, kind) for name, kind in fields["alive"])
    for name in ("names", "sentences", "trace"):
        fields[name] = tuple(fields[name])
    return Outcome(**fields)
