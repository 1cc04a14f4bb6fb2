"""The log of a profile by phase, and its JSON. Each nanosecond of the recording belongs to exactly one phase."""

from __future__ import annotations

import base64
import binascii
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

from nbguard.errors import DamagedDataError

# --- The phases of a fit, in the words of the report.


WAIT = "wait for data"
TO_DEVICE = "to device"
TRANSFORMS = "batch transforms"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
STEP = "optimizer step"
ZERO_GRAD = "zero_grad"
WORKERS = "workers start"
OWN = "nbguard itself"
OTHER = "other code"

STEP_PHASES = (WAIT, TO_DEVICE, TRANSFORMS, FORWARD, LOSS, BACKWARD, STEP, ZERO_GRAD)
"""The phases of a training batch, in the order of their run. Callbacks are added to them by name."""

ALL = (*STEP_PHASES, WORKERS, OWN, OTHER)


def callback(name: str) -> str:
    """Return the phase of a callback, by the name of its class. Only for display: logs keep the name separately."""
    return f"callback {name}"


BoundaryKind = Literal["batch", "end", "loss", "step", "fit", "disturbed", "cut"]
"""`batch`: an iterator over a loader was asked for its next batch. `end`: it had none left. `loss`: there is a loss to train
on. `step`: an optimizer has stepped. `fit`: a Learner's fit began. `disturbed`: in this batch nbguard looked closer: its
times tell nothing of the fit. `cut`: an error ended the fit in a pass whose model is in training mode and records gradients."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """An event that divides the log into batches and fits."""

    at: int  # entries of the log before it
    kind: BoundaryKind  # of event
    loop: int  # number of the iterator, or for "fit" of the Learner's fit; 0 if none


class LogPosition(NamedTuple):
    """A place between two entries of a log."""

    marks: int  # before it
    boundaries: int  # before it


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLog:
    """The phases of a recording, end to end: `labels[codes[i]]` lasted from `times[i - 1]` (`start` at first) to `times[i]`."""

    start: int  # nanoseconds of time.perf_counter_ns
    codes: Sequence[int]  # numbers of phases
    times: Sequence[int]  # ends of these phases, nanoseconds of time.perf_counter_ns
    labels: tuple[str, ...]  # names of the phases, by number
    boundaries: tuple[Boundary, ...] = ()  # in their order
    callbacks: Mapping[str, str] = field(default_factory=dict)  # class of the callback by its phase; other phases are missing

    @property
    def end(self) -> int:
        """Return when the last mark was set."""
        return self.times[-1] if self.times else self.start

    @property
    def wall(self) -> int:
        """Return the nanoseconds from the start to the last mark."""
        return self.end - self.start

    def divided(self, places: Sequence[LogPosition]) -> tuple[PhaseLog, ...]:
        """Return the log in parts, divided at these places in their order; each part begins where the one before ends."""
        if not places:
            return (self,)
        bounds = (LogPosition(0, 0), *places, LogPosition(len(self.codes), len(self.boundaries)))
        return tuple(self._part(first, last) for first, last in pairwise(bounds))

    def _part(self, first: LogPosition, last: LogPosition) -> PhaseLog:
        inside = self.boundaries[first.boundaries : last.boundaries]
        return replace(
            self,
            start=self.times[first.marks - 1] if first.marks else self.start,
            codes=self.codes[first.marks : last.marks],
            times=self.times[first.marks : last.marks],
            boundaries=tuple(replace(boundary, at=boundary.at - first.marks) for boundary in inside),
        )


def joined(parts: Sequence[PhaseLog]) -> PhaseLog:
    """Return the parts of a log as one again."""
    if len(parts) == 1:
        return parts[0]
    codes = [code for part in parts for code in part.codes]
    times = [time for part in parts for time in part.times]
    before, boundaries = 0, []
    for part in parts:
        boundaries += [replace(boundary, at=boundary.at + before) for boundary in part.boundaries]
        before += len(part.codes)
    return replace(parts[-1], start=parts[0].start, codes=codes, times=times, boundaries=tuple(boundaries))


# --- The log of a fit in JSON, as columns of numbers, compressed. Times are differences of two or three bytes.


_KINDS: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
_PLAIN = 1 << 18
"""Entries that any log may have. One with more has as many as its packed times explain, as no two are alike for long."""
_PER_LETTER = 8
"""Entries for each letter of the packed times, at most."""


def pack_log(log: PhaseLog) -> dict[str, Any]:
    """Return a log as plain data."""
    return {
        "start": log.start,
        "labels": list(log.labels),
        "callbacks": dict(log.callbacks),
        "marks": len(log.codes),
        "codes": _pack("H", log.codes),
        "times": _pack("q", _steps(log.times, log.start)),
        "boundaries": len(log.boundaries),
        "kinds": _pack("B", [_KINDS.index(boundary.kind) for boundary in log.boundaries]),
        "places": _pack("q", _steps([boundary.at for boundary in log.boundaries], 0)),
        "loops": _pack("q", [boundary.loop for boundary in log.boundaries]),
    }


def unpack_log(data: Any, where: str) -> PhaseLog:
    """Return the log of plain data; DamagedDataError if they are damaged. `where` names the field in messages."""
    try:
        labels, most = tuple(data["labels"]), max(_PLAIN, _PER_LETTER * len(data["times"]))
        codes = _unpack("H", data["codes"], data["marks"], most)
        times = array("q", accumulate(_unpack("q", data["times"], data["marks"], most), initial=data["start"]))[1:]
        kinds = _unpack("B", data["kinds"], data["boundaries"], most)
        places = accumulate(_unpack("q", data["places"], data["boundaries"], most))
        loops = _unpack("q", data["loops"], data["boundaries"], most)
        boundaries = tuple(Boundary(at, _KINDS[kind], loop) for at, kind, loop in zip(places, kinds, loops, strict=True))
        callbacks = dict(data["callbacks"])
        if len(data) != len(PACKED) or any(code >= len(labels) for code in codes):
            raise ValueError
        if not all(map(_is_text, (*labels, *callbacks, *callbacks.values()))):
            raise ValueError
    except (TypeError, KeyError, IndexError, ValueError, OverflowError, binascii.Error, zlib.error, struct.error):
        raise DamagedDataError(f"its log of phases ({where!r}) is damaged") from None
    return PhaseLog(start=data["start"], codes=codes, times=times, labels=labels, boundaries=boundaries, callbacks=callbacks)


PACKED = ("start", "labels", "callbacks", "marks", "codes", "times", "boundaries", "kinds", "places", "loops")
"""The fields of a packed log."""


def _is_text(label: object) -> bool:
    return type(label) is str


def _steps(values: Sequence[int], start: int) -> list[int]:
    """Return by how much each value is larger than the one before."""
    return [after - before for before, after in pairwise((start, *values))]


def _pack(code: str, values: Sequence[int]) -> str:
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode("ascii")


def _unpack(code: str, text: str, count: int, most: int) -> array[int]:
    numbers = array(code)
    if type(count) is not int or not 0 <= count <= most:
        raise ValueError
    size = count * numbers.itemsize
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(text, validate=True), size + 1)
    if len(data) != size:
        raise ValueError
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
