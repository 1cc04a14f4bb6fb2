"""The card after an out-of-memory error as blocks, with the request, the memory then and now, its holders, the fixes."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.memory.core.oom_facts import HOST_KINDS, OomNote
from nbguard.memory.core.views.device import holder_row, holder_table, part_figures, total_row
from nbguard.memory.out_of_memory.card import OomCard, asked_words
from nbguard.memory.out_of_memory.fixes import Fix
from nbguard.memory.out_of_memory.rerun import VERDICT_TEXTS, RerunVerdict
from nbguard.render.blocks import Block, Line, Listing, Point, Points, Section, Table, TableRow, Title
from nbguard.texts import capitalised, joined
from nbguard.units import format_bytes, format_column, unit_of

_EFFECTS = {
    RerunVerdict.FURTHER: "the cell gets past the line that failed, but later code may need more",
    RerunVerdict.REQUEST: "this request has room then, but the cell may take more before it",
}
"""Effects of a fix that may be enough, in the words of the answer."""


def oom_blocks(card: OomCard) -> Iterator[Block]:
    """Yield the answer, the error, all that helps, and below it the memory that this is computed from."""
    yield Title(answer(card), "strong")
    yield Section(card.asked.error, _place(card))
    yield Line(asked_words(card.asked, card.device))
    yield Points(tuple(map(_point, card.fixes)), "what helps", is_numbered=True)
    if card.savings is not None:
        yield Line(card.savings.code + f" {card.savings.effect}")
    if card.airbag is not None:
        yield Line(card.airbag.code + f" {card.airbag.effect}")
    yield from (Line(sentence, "dim") for sentence in _situation(card))
    if card.holders:
        yield _holders(card)
    if card.notes:
        yield Listing(sentences=card.notes)


def answer(card: OomCard) -> str:
    """Return what to do in a sentence: the best of the fixes."""
    best = card.fixes[0]
    code = joined(", then ", (line.code for line in best.advice))
    is_one = len(best.advice) == 1
    frees = f"free{'s' if is_one else ''} {format_bytes(best.nbytes)}"
    match best.verdict:
        case RerunVerdict.RERUN if code:
            enough = "is enough: it" if is_one else "are enough: they"
            return code + f" {enough} {frees}, and the cell gets past the line that failed."
        case RerunVerdict.FURTHER | RerunVerdict.REQUEST if code and not best.is_of_smaller_run:
            return code + f" {frees}: {_EFFECTS[best.verdict]}."
        case RerunVerdict.RERUN | RerunVerdict.NEVER | RerunVerdict.REQUEST | RerunVerdict.FURTHER:
            return capitalised(best.words) + "."
    words = "after " + code + ", " + best.words if code else best.words
    return "Nothing is known to be enough: " + words + "."


def _place(card: OomCard) -> str:
    """Return where it happened: `in In[7], line 3 of In[5]: hidden = body(x), shown as ValueError`."""
    asked, place = card.asked, ""
    if asked.line is not None:
        ran = "in " if asked.cell is None else f"in In[{asked.cell}], "
        of = "" if asked.line.cell in (None, asked.cell) else f" of In[{asked.line.cell}]"
        place = f"{ran}line {asked.line.number}{of}" + (f": {asked.line.text}" if asked.line.text else "")
    return place + (f", shown as {asked.shown}" if asked.shown else "")


def _situation(card: OomCard) -> Iterator[str]:
    """Yield the memory at the time of the error, the memory now, and the largest request that would succeed."""
    if card.asked.note is not None:
        yield "then: " + " · ".join(_then(card.asked.note))
        if card.cell_took:
            whole = format_bytes(card.asked.note.allocated)
            yield f"the cell itself had allocated {format_bytes(card.cell_took)} of the {whole} that were allocated"
    if card.parts and card.asked.kind in HOST_KINDS:
        yield " · ".join(f"{part.label} {format_bytes(part.nbytes)}" for part in card.parts)
    elif card.parts:
        shown = zip(card.parts, part_figures(card.parts), strict=True)
        yield "now: " + " · ".join(f"{part.label} {figure}" for part, figure in shown if part.nbytes)
    limits = [] if card.had is None else [f"{format_bytes(card.had)} can be allocated now"]
    limits += [f"a memory fraction limits PyTorch to {format_bytes(card.limit)}"] if card.limit is not None else []
    limits += [f"the failed run still holds {format_bytes(card.taken)}"] if card.taken else []
    if limits:
        yield " · ".join(limits)


def _then(note: OomNote) -> Iterator[str]:
    amounts: dict[str, int | None] = {"free": note.free, "allocated": note.allocated, "reserved": note.reserved}
    if note.stranded is not None:
        amounts |= {"stranded": note.stranded, "largest free block": note.largest_free}
    yield from (f"{name} {format_bytes(nbytes)}" for name, nbytes in amounts.items())


def _holders(card: OomCard) -> Table:
    """Return the largest holders, the rest in one row, and the total: the figures shown add up to it."""
    rest = card.held - sum(holder.retained for holder in card.holders)
    unit = unit_of(card.held)
    figures = format_column([*(holder.retained for holder in card.holders), rest], unit)
    rows = [holder_row(holder, figure, unit) for holder, figure in zip(card.holders, figures, strict=False)]
    if rest:
        rows.append(TableRow(cells=("the rest", figures[-1], "", "", "", advice.REPORT.command)))
    return holder_table([*rows, total_row(card.held)])


def _point(fix: Fix) -> Point:
    figures = [] if fix.nbytes is None else [format_bytes(fix.nbytes)]
    commands = joined(", then ", (line.code for line in fix.advice))
    first = "after " + commands if commands and fix.is_of_smaller_run else commands  # else they would be taken for all of it
    return Point(
        word=VERDICT_TEXTS[fix.verdict],
        what=joined(" · ", filter(None, [*figures, first])),
        lines=(fix.words, *fix.code.splitlines()),
    )
