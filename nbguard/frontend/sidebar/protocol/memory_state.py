"""The result of a scan for a sidebar, with holders, experiments, segments, the last out-of-memory error."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from nbguard.frontend.sidebar.protocol.rows import Rows, abilities, beside_running_code, experiments, frees_of, note_of, rows_of
from nbguard.frontend.sidebar.protocol.state import (
    DeviceSegments,
    FindingLine,
    FixRow,
    HolderRow,
    MemoryState,
    OomView,
    Piece,
    PieceKind,
    Strip,
    UnlistedHolders,
)
from nbguard.frontend.sidebar.protocol.ticks import fitting, json_bytes, truncate_utf8
from nbguard.memory.cleanup.plan.parking import default_plan, pins_of
from nbguard.memory.core.advice import least_shown
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import PoolId, Segment
from nbguard.memory.core.fragmentation import free_runs, returnable_part
from nbguard.memory.core.pinning import HolderPins
from nbguard.memory.out_of_memory.card import OomCard, asked_words, build_card
from nbguard.memory.out_of_memory.fixes import Fix
from nbguard.memory.out_of_memory.rerun import VERDICT_TEXTS, RerunVerdict
from nbguard.memory.reports.findings import find
from nbguard.memory.reports.notices.notice import Notice
from nbguard.memory.reports.notices.view import notice_sentence
from nbguard.units import counted, format_bytes

# --- The segments of a device for a sidebar, with strips to draw, the largest request, the holder that stands in its way.


_KINDS: tuple[PieceKind, ...] = ("allocated", "releasable", "stranded", "kept")
_STRIPS = 40
"""So many strips are drawn in all; few kinds of segments stand for the rest, each added up to one strip."""
_GROUPS = 8
_SEGMENTS_SENTENCE = 400
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
        sentence=truncate_utf8(_sentence(device), _SEGMENTS_SENTENCE),
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


_MESSAGE = 60_000
"""Most bytes of a heap as JSON: the rest of 64 kB goes to the message around it."""
_HOLDERS = 150
_EXPERIMENTS = 10_000
_FINDINGS, _FIXES, _OTHERS, _NOTICES = 6, 6, 3, 4
_SENTENCE = 400
_SHOWN_ELSEWHERE = frozenset({"stale", "oom", "parked"})
"""Findings that a heap has a place of its own for."""


def build_memory_state(
    analysis: Analysis,
    boot: str,
    number: int,
    *,
    t: float,
    seconds: float,
    cell: int | None,
    during: int | None = None,
    over: Collection[int | None] = (),
) -> tuple[MemoryState, Rows]:
    """Return the memory state of a scan, and the meaning of its rows in requests.

    It is the `number`-th of the kernel `boot`, looked at in `seconds` at time `t`: after the cell `cell`, or in the middle of
    the cell `during`. The card on a cell that has run through is left out, as is one on a cell in `over`, which would now.
    """
    rows = rows_of(analysis)
    heap = MemoryState(
        boot=boot,
        heap=number,
        t=t,
        seconds=seconds,
        cell=cell,
        during=during,
        stale=analysis.once(default_plan).promised,
        least=max(rows.least, default=least_shown(0)),
        experiments=fitting(experiments(analysis.facts, rows), _EXPERIMENTS),
        devices=device_segments(analysis.once(beside_running_code)),
        findings=_findings(analysis),
        oom=_oom(analysis.once(build_card), over),
    )
    listed = (_holder(rows, place) for place in range(min(len(rows.holders), _HOLDERS)))
    holders = fitting(listed, _MESSAGE - json_bytes(heap))
    rest = rows.holders[len(holders) :]
    return replace(heap, holders=holders, more=UnlistedHolders(len(rest), sum(row.retained for row in rest))), rows


def _holder(rows: Rows, number: int) -> HolderRow:
    row = rows.holders[number]
    return HolderRow(
        id=number,
        label=truncate_utf8(row.label),
        kind=row.kind,
        what=truncate_utf8(row.what),
        path=truncate_utf8(row.path),
        short=truncate_utf8(rows.short[number], 60),
        device=rows.devices[number],
        nbytes=row.retained,
        frees=frees_of(row),
        reaches=row.reaches,
        together=tuple(truncate_utf8(text, 60) for text in row.others[:_OTHERS]),
        is_small=row.shown < rows.least[number],
        cell=row.cell,
        stale=row.stale,
        stale_bytes=row.stale_bytes,
        at_least=row.at_least,
        parts=rows.parts[number],
        is_running=rows.is_running[number],
        note=note_of(rows, number),
        can=abilities(rows, number),
    )


def _findings(analysis: Analysis) -> tuple[FindingLine, ...]:
    findings = [finding for finding in find(analysis) if finding.kind not in _SHOWN_ELSEWHERE][:_FINDINGS]
    return tuple(
        FindingLine(
            truncate_utf8(one.sentence, _SENTENCE),
            truncate_utf8(one.command),
            truncate_utf8(one.learner),
            _key(one.kind, one.command, one.learner),
            None,
        )
        for one in findings
    )


def notice_lines(notices: tuple[Notice, ...]) -> tuple[FindingLine, ...]:
    """Return notices in words, the first of them; a command of several lines stands in none."""
    commands = ("" if "\n" in notice.command else notice.command for notice in notices)
    return tuple(
        FindingLine(
            truncate_utf8(notice_sentence(notice), _SENTENCE),
            truncate_utf8(command),
            "",
            key_of_notice(notice),
            notice.cell,
        )
        for notice, command in zip(notices[:_NOTICES], commands, strict=False)
    )


def key_of_notice(notice: Notice) -> str:
    """Return the name of a notice in requests, which is its event's."""
    return _key("notice", *notice.fingerprint)


def is_cured(card: OomCard) -> bool:
    """Say whether the cell that failed has room now for all that it takes: nothing is left to do but to run it again."""
    return bool(card.fixes) and card.fixes[0].verdict is RerunVerdict.RERUN and not card.fixes[0].commands


def _key(*parts: object) -> str:
    """Return the name of a finding, a notice or a card in requests: letters and digits that are its own."""
    return hashlib.blake2s(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _oom(card: OomCard | None, over: Collection[int | None]) -> OomView | None:
    """Return the card in the words of a sidebar: the request, the memory that can be allocated now, the remedies."""
    if card is None or card.is_over or card.asked.cell in over:
        return None
    where = "" if card.asked.cell is None else f" in In[{card.asked.cell}]"
    sentence = asked_words(card.asked, card.device)
    sentence = f"{sentence[:1].upper()}{sentence[1:]}{_at_the_failure(card)}"
    if card.had is not None:
        sentence += f"; afterwards, {format_bytes(card.had)} could be allocated"
    return OomView(
        title=f"Out of memory{where}",
        sentence=f"{truncate_utf8(sentence, _SENTENCE)}.",
        fixes=tuple(map(_fix, card.fixes[:_FIXES])),
        key=_key("card", card.asked.cell, card.asked.requested),
        cell=card.asked.cell,
    )


def _at_the_failure(card: OomCard) -> str:
    """Return the memory at the time of the failure, and the cell's own share of it; empty where the error tells neither."""
    note = card.asked.note
    if note is None:
        return ""
    amounts = [(note.free, "free"), (note.allocated, "allocated")]
    there = " and ".join(f"{format_bytes(nbytes)} were {word}" for nbytes, word in amounts if nbytes)
    own = f", {format_bytes(card.cell_took)} of it taken by the cell itself" if card.cell_took else ""
    return f" when {there}{own}" if there else ""


def _fix(fix: Fix) -> FixRow:
    first = "after this line, " if fix.commands and fix.is_of_smaller_run else ""
    words = f"{VERDICT_TEXTS[fix.verdict]}: {first}" + truncate_utf8(fix.words, _SENTENCE)
    return FixRow(words, fix.nbytes, tuple(map(truncate_utf8, fix.commands)))
