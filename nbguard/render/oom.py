"""The card after an out-of-memory error, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nbguard.memory.oom_facts import HOST_KINDS
from nbguard.out_of_memory.card import OomCard, asked_words
from nbguard.out_of_memory.fixes import Fix
from nbguard.render.elements import head_line, holder_table, listed, page, table_row, with_code
from nbguard.render.rows import Row, row_of
from nbguard.render.text import holder_lines
from nbguard.units import format_bytes, format_column, unit_of

_VERDICTS = {True: "enough", False: "not enough alone", None: "may be enough"}
_FIXES = "what lets it through"


def oom_text(card: OomCard) -> str:
    """Return the card as text, at most some 120 characters wide."""
    lines = [_title(card), *(f"  {line}" for line in _situation(card))]
    rows, total = _rows(card)
    lines += ["", *holder_lines(rows, total)] if rows else []
    lines += ["", f"  {_FIXES}"]
    for number, fix in enumerate(card.fixes, 1):
        lines += [f"  {number}. {' · '.join(_head_of(fix))}", f"     {fix.words}"]
    lines += ["", *(f"  ○ {note}" for note in card.notes)] if card.notes else []
    return "\n".join(lines)


def oom_html(card: OomCard) -> str:
    """Return the card as HTML."""
    body = head_line(card.asked.error, _place(card), escape(asked_words(card.asked, card.device)))
    body += "".join(f'<div class="dim">{escape(line)}</div>' for line in _situation(card)[1:])
    rows, total = _rows(card)
    body += holder_table(rows, total) if rows else ""
    steps = "".join(_step(number, fix) for number, fix in enumerate(card.fixes, 1))
    body += f'<div><b>{_FIXES}</b></div><table class="steps"><tbody>{steps}</tbody></table>'
    return page(body + listed(card.notes))


def _title(card: OomCard) -> str:
    place = _place(card)
    return f"{card.asked.error} {place}" if place else card.asked.error


def _place(card: OomCard) -> str:
    """Return where it happened: `in In[7], line 3 of In[5]: hidden = body(x), shown as ValueError`."""
    asked, found = card.asked, ""
    if asked.line is not None:
        ran = "in " if asked.cell is None else f"in In[{asked.cell}], "
        of = "" if asked.line.cell in (None, asked.cell) else f" of In[{asked.line.cell}]"
        found = f"{ran}line {asked.line.number}{of}" + (f": {asked.line.text}" if asked.line.text else "")
    return found + (f", shown as {asked.shown}" if asked.shown else "")


def _situation(card: OomCard) -> list[str]:
    """Return what was asked for, what there was then and is now, a line each."""
    note, lines = card.asked.note, [asked_words(card.asked, card.device)]
    if note is not None:
        then: list[tuple[str, int | None]] = [("free", note.free), ("allocated", note.allocated), ("reserved", note.reserved)]
        then += [("stranded", note.stranded), ("largest free block", note.largest_free)] if note.stranded is not None else []
        lines.append("then: " + " · ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in then))
    if card.asked.kind in HOST_KINDS:
        lines += [" · ".join(f"{part.label} {format_bytes(part.nbytes)}" for part in card.parts)] if card.parts else []
    elif card.parts:
        figures = format_column([part.nbytes for part in card.parts], unit_of(sum(part.nbytes for part in card.parts)))
        shown = [(part.label, figure) for part, figure in zip(card.parts, figures, strict=True) if part.nbytes]
        lines.append("now: " + " · ".join(f"{name} {figure}" for name, figure in shown))
    most = [] if card.had is None else [f"{format_bytes(card.had)} can be had now"]
    most += [f"a memory fraction limits PyTorch to {format_bytes(card.limit)}"] if card.limit is not None else []
    most += [f"the failed run still holds {format_bytes(card.taken)}"] if card.taken else []
    return [*lines, *([" · ".join(most)] if most else [])]


def _rows(card: OomCard) -> tuple[list[Row], str]:
    """Return the rows of the largest holders, the rest in one, and the total."""
    rest = card.held - sum(holder.retained for holder in card.holders)
    unit = unit_of(card.held)
    figures = format_column([*(holder.retained for holder in card.holders), rest], unit)
    rows = [row_of(holder, figure, unit) for holder, figure in zip(card.holders, figures, strict=False)]
    more = [Row(name="the rest", retained=figures[-1], reaches="", since="", what="%gpumem lists them")] if rest else []
    return [*rows, *more], format_column([card.held], unit)[0]


def _head_of(fix: Fix) -> Iterator[str]:
    yield _VERDICTS[fix.enough]
    if fix.nbytes is not None:
        yield format_bytes(fix.nbytes)
    if fix.commands:
        yield ", then ".join(fix.commands)


def _step(number: int, fix: Fix) -> str:
    code = ", then ".join(f"<code>{escape(command)}</code>" for command in fix.commands)
    figure = "" if fix.nbytes is None else format_bytes(fix.nbytes)
    what = f"{code}<div>{with_code(fix.words)}</div>" if code else with_code(fix.words)
    return table_row(f"{number}.", what, figure, escape(_VERDICTS[fix.enough]), numbers=(2,))
