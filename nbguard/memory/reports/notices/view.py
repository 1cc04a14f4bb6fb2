"""Notices in words, one sentence each, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core.advice import NOTICES_ON, is_python, why
from nbguard.memory.core.references.graph import GRAPH
from nbguard.memory.reports.notices.notice import NOT_SHOWN, Notice, Notices
from nbguard.render.html import Block, Table, TableRow, Title
from nbguard.texts import joined
from nbguard.units import counted, format_bytes

_NAMED = 3
"""Names, besides the first, that a sentence lists."""


def notice_line(notice: Notice) -> str:
    """Return a notice as the line after a cell, with its command."""
    advice = _advice(notice)
    return f"{notice_sentence(notice)} · " + advice if advice else notice_sentence(notice)


def notice_sentence(notice: Notice) -> str:
    """Return a notice as a sentence, without its command."""
    amount, holders = format_bytes(notice.nbytes), _holders(notice)
    many = len(notice.holders) > 1
    match notice.kind:
        case "view":
            view = f"`{notice.holders[0]}` ({format_bytes(notice.view_nbytes)}, a view)"
            of = f"the earlier `{notice.name}`" if notice.holders[0] == notice.name else f"`{notice.name}`"
            return f"{view} keeps {amount} of {of} alive"
        case "growth":
            what = "its graph" if notice.keeps_graph else "it"
            return f"each run of In[{notice.cell}] leaves {amount} more; {holders} {'keep' if many else 'keeps'} {what}"
        case "error":
            return f"In[{notice.cell}] failed, and its error keeps {amount} alive"
        case "left":
            return f"In[{notice.cell}] left {amount} that no name leads to, held by {holders}"
        case "rebound":
            earlier = f"the earlier {_names(notice)}"
            earlier += f" (In[{notice.bound}])" if notice.bound is not None and not notice.beside else ""
            if notice.is_whole:
                return f"{earlier} {'are' if notice.beside else 'is'} still alive ({amount}), held by {holders}"
            return f"{amount} of {earlier} is still alive, held by {holders}"
        case _:
            its, it = ("their", "them") if notice.beside else ("its", "it")
            whose = f"{its} {amount}" if notice.is_whole else f"{amount} of {it}"
            was = "were" if notice.beside else "was"
            return f"{_names(notice)} {was} deleted, but {whose} is still in memory, held by {holders}"


def _names(notice: Notice) -> str:
    """Return the names whose deletion the notice is about: `a`, `b` and 2 more."""
    first, *others = (f"`{name}`" for name in (notice.name, *notice.beside))
    if not others:
        return first
    if len(others) > _NAMED:
        return f"{', '.join((first, *others[: _NAMED - 1]))} and {len(others) - _NAMED + 1} more"
    return f"{', '.join((first, *others[:-1]))} and {others[-1]}"


def notices_blocks(notices: Notices, limit: int = 100) -> Iterator[Block]:
    """Yield the table of the last notices that hold, how many are over, and a sentence on the switch."""
    state = "" if notices.on else "notices are off: " + NOTICES_ON.command
    if notices.quiet and notices.on:
        state = "notices are hidden" if "*" in notices.quiet else f"notices about {', '.join(notices.quiet)} are hidden"
        state += "; " + NOTICES_ON.command + " shows all again"
    if not notices.notices:
        yield Title("no notices so far" + ("; " + state if state else ""), "dim")
        return
    left = [one for one in notices.notices if one.is_left]
    rows = (
        TableRow(
            cells=(
                f"In[{one.cell}]",
                format_bytes(one.nbytes),
                notice_sentence(one),
                f"{one.times} times" if one.kind == "growth" and one.times > 1 else "",
                _advice(one).replace("`", ""),
            )
        )
        for one in left[-limit:]
    )
    if left:
        yield Table(rows=tuple(rows), figures=(1,), code=(4,), widest=200)
    over = len(notices.notices) - len(left)
    if over:
        none = "" if left else "no notice holds any more; "
        yield Title(f"{none}{counted(over, 'earlier one')} {'is' if over == 1 else 'are'} over", "dim")
    if state:
        yield Title(state, "dim")


def _holders(notice: Notice) -> str:
    first, *others = notice.holders
    cell = "" if notice.holder_cell is None or notice.holder_kind == "out" else f" (In[{notice.holder_cell}])"
    cell = cell if notice.registered == 1 else f"{cell[:-1] or ' ('}{', ' if cell else ''}{notice.registered} times)"
    text = _quoted(first) + cell
    return f"{text} and {len(others)} more" if len(others) > 1 else f"{text} and {_quoted(others[0])}" if others else text


def _quoted(holder: str) -> str:
    """Return a holder as code if it is; words stand as they are."""
    if holder == NOT_SHOWN:
        return holder
    if holder == "last error":
        return "the last error"
    return f"`{holder}`"


def _advice(notice: Notice) -> str:
    """Return the lines that free it; where none do and many hold it, the line that shows all of them."""
    later = ""
    if notice.kind == "growth" and notice.keeps_graph:
        later = f"{'append' if '[' in notice.holders[0] else 'keep'} `loss.item()` or `t.detach()`"
    elif notice.kind == "growth" and notice.holder_kind == "name" and "[" in notice.holders[0]:
        later = "append `t.detach().cpu()`, or keep less"
    if notice.advice:
        lines = joined(" and ", (line.code for line in notice.advice))
        return lines + f", and from now on {later}" if later and notice.keeps_graph else lines
    if notice.is_for_good:
        return f"{'they go' if len(notice.holders) > 1 else 'it goes'} only with the kernel"
    if notice.kind == "deleted" and is_python(notice.name):  # a deleted name is remembered, with all that is left of it
        return "see " + why(notice.name).code
    first = notice.holders[0].partition(GRAPH)[0]
    if (len(notice.holders) > 2 or notice.kind != "growth") and notice.holder_kind == "name" and is_python(first):
        return "see " + why(first).code
    return later
