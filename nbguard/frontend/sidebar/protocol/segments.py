"""The segments of a device for a sidebar, with strips to draw, the largest request, the holder that stands in its way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from nbguard.frontend.sidebar.protocol.state import DeviceSegments, Piece, PieceKind, Strip
from nbguard.frontend.sidebar.protocol.truncation import truncate_utf8
from nbguard.memory.cleanup.plan.default import pins_of
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import PoolId, Segment
from nbguard.memory.core.segments.fragmentation import free_runs, returnable_part
from nbguard.memory.core.segments.pinning import HolderPins
from nbguard.units import counted, format_bytes

_KINDS: tuple[PieceKind, ...] = ("allocated", "releasable", "stranded", "kept")
_STRIPS = 40
"""So many strips are drawn in all; few kinds of segments stand for the rest, each added up to one strip."""
_GROUPS = 8
_SENTENCE = 400
_PIECES = 8
"""A segment in more pieces than this is drawn as its sums."""


def device_segments(analysis: Analysis) -> tuple[DeviceSegments, ...]:
    """Return the segments of each device that has some, and the largest request there."""
    mapped = [device for device in analysis.devices if device.facts.segments]
    share = max(1, (_STRIPS - _GROUPS) // max(1, len(mapped)))
    return tuple(_device(device, share) for device in mapped)


def _device(device: DeviceAnalysis, singles: int) -> DeviceSegments:
    segments = device.facts.segments or ()
    return DeviceSegments(
        device=device.name,
        segments=len(segments),
        strips=strips(segments, device.analysis.pools_in_use, singles),
        largest_now=device.largest.now,
        largest_flushed=device.largest.flushed,
        sentence=truncate_utf8(_sentence(device), _SENTENCE),
    )


def strips(segments: Iterable[Segment], in_use: Collection[PoolId], singles: int) -> tuple[Strip, ...]:
    """Return the segments to draw: the most stranded and largest `singles` of them alone, the rest added up by their kinds.

    Their bytes add up to the reserved bytes.
    """
    drawn = [Strip(1, segment.total_size, tuple(_pieces(segment, in_use))) for segment in segments]
    drawn.sort(key=lambda strip: (-_sums(strip.pieces).get("stranded", 0), -strip.nbytes))
    rest: dict[tuple[PieceKind, ...], list[Strip]] = {}
    for strip in drawn[singles:]:
        rest.setdefault(tuple(_sums(strip.pieces)), []).append(strip)
    alone = tuple(strip if len(strip.pieces) <= _PIECES else _added([strip]) for strip in drawn[:singles])
    return (*alone, *sorted(map(_added, rest.values()), key=lambda strip: -strip.nbytes))


def _added(strips: Sequence[Strip]) -> Strip:
    pieces = tuple(Piece(*piece) for piece in _sums(piece for strip in strips for piece in strip.pieces).items())
    return Strip(sum(strip.segments for strip in strips), sum(strip.nbytes for strip in strips), pieces)


def _sums(pieces: Iterable[Piece]) -> dict[PieceKind, int]:
    """Return the bytes of each kind that there is, in the order of drawing."""
    sums = dict.fromkeys(_KINDS, 0)
    for kind, nbytes in pieces:
        sums[kind] += nbytes
    return {kind: nbytes for kind, nbytes in sums.items() if nbytes}


def _pieces(segment: Segment, in_use: Collection[PoolId]) -> Iterator[Piece]:
    """Yield a segment's (kind, bytes) by address, neighbours of one kind as one. Waiting for a stream is allocated."""
    end = segment.address
    for start, size in free_runs(segment):
        if start > end:
            yield Piece("allocated", start - end)
        at, back = (start, 0) if segment.pool in in_use else returnable_part(segment, start, size)
        kind: PieceKind = "kept" if segment.pool in in_use else "stranded"
        before, after = (at - start, start + size - at - back) if back else (size, 0)
        yield from (piece for piece in (Piece(kind, before), Piece("releasable", back), Piece(kind, after)) if piece.nbytes)
        end = start + size
    if segment.address + segment.total_size > end:
        yield Piece("allocated", segment.address + segment.total_size - end)


def _sentence(device: DeviceAnalysis) -> str:
    """Return in words the bytes that are free and cannot go back, and the holder that pins most of them."""
    stranded = device.space.stranded
    if not stranded:
        return "Nothing is stranded; all memory that PyTorch keeps free can go back to the device."
    sentence = f"{format_bytes(stranded)} is free, but live blocks keep it from going back."
    pins = device.once(pins_of)
    return f"{sentence} {_pinned_by(pins[0])}" if pins else sentence


def _pinned_by(row: HolderPins) -> str:
    what = "block" if row.kind in ("library", "pending") else "tensor"
    who = f"{counted(row.blocks, what)} of {truncate_utf8(row.label, 80)} ({format_bytes(row.nbytes)})"
    pin = "pins" if row.blocks == 1 else "pin"
    if not row.stranded_alone:
        return f"{who}, together with others, {pin} {format_bytes(row.stranded)}."
    them = "it" if row.blocks == 1 else "them"
    how = f"Clean stale frees {them}" if row.stale else f"letting {them} go"
    gives = f"{'and gives' if row.stale else 'gives'} {format_bytes(row.gives_back)} back"
    return f"{who} {pin} {format_bytes(row.stranded_alone)}: {how} {gives}."
