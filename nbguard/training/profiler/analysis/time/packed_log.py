"""The log of a fit in JSON, as columns of numbers, compressed. Times are differences of two or three bytes."""

from __future__ import annotations

import base64
import binascii
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args

from nbguard.errors import DamagedDataError
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, PhaseLog

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
