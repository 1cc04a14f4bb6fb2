"""The card after an out-of-memory error, with the request, the memory then and now, its holders and fixes, and its view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.cleanup.plan.parking import default_plan, holders_of, parts_of_device
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice, Finding, airbag, least_of_rows
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis, DevicePart, Part, other_processes, others_line
from nbguard.memory.core.device_view import holder_row, holder_table, part_figures, total_row
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.oom_facts import HOST_KINDS, HostFacts, OomFact, OomNote
from nbguard.memory.core.references.graph import reach_of_roots, storages_of
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.out_of_memory.failed_request import (
    FailedRequest,
    batch_that_fits,
    predicted_changes,
    savings_of,
    survival_of,
)
from nbguard.memory.out_of_memory.fixes import Fix, OomContext, fixes, has_graph
from nbguard.memory.out_of_memory.release_candidates import growing_container
from nbguard.memory.out_of_memory.rerun import VERDICT_TEXTS, Rerun, RerunVerdict
from nbguard.render.html import Block, Line, Listing, Point, Points, Section, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import capitalised, joined
from nbguard.units import GiB, format_bytes, format_column, unit_of

_HOLDERS = 5
_LEAST_AIRBAG = 4 * GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCard(Result):
    """The card of `%gpumem oom`. Frozen numbers and words: keeping one keeps nothing else alive. All sizes are bytes."""

    kind: ClassVar[str] = "oom_card"
    view: ClassVar[str] = "nbguard.memory.out_of_memory.card:oom_blocks"

    asked: OomFact  # the error itself, by its text and its observer
    device: str  # name of the place that ran out: `cuda:0`, `cpu`
    parts: tuple[Part, ...]  # of the device now (they add up to its size), or of the host
    limit: int | None  # bytes that torch may reserve, if that is less than the device (its memory fraction)
    largest_free: int | None  # largest free block in torch's cache that a request can get; None if segments are not known
    had: int | None  # the largest request that would succeed now (`Room.largest`, cache emptied); None if unknown
    taken: int  # bytes that the failed run still holds itself
    cell_took: int | None  # bytes of the cell in use at the failure beyond those at its beginning; None if unknown
    needed: int | None  # least bytes that the cell needs at the same time, with the request; None if the error does not say
    holders: tuple[Holder, ...]  # the largest
    held: int  # bytes that all holders hold
    fixes: tuple[Fix, ...]  # the best first
    savings: Advice | None  # the command to try more changes, if a fit of a Learner failed
    survival: Advice | None  # the line that lets such a training go on with smaller pieces of its batch, where that is possible
    airbag: Advice | None  # the command that lets such a cell go on in host memory, where that is possible
    notes: tuple[str, ...]  # sentences that must be known to read the figures
    is_over: bool = False  # reports say no more of it: its cell has run through since, or nothing of it is left and others have


def build_card(analysis: Analysis) -> OomCard | None:
    """Return the card on the last error, or None if it did not run out of memory."""
    facts, oom = analysis.facts, analysis.facts.oom
    if oom is None:
        return None
    request = FailedRequest.of(analysis, oom)
    rerun = Rerun.of(request)
    device = _tracked(request)
    holders = () if device is None else device.once(holders_of)
    held = sum(holder.retained for holder in holders)
    least = least_of_rows(holder.retained for holder in holders)
    parts = _host_parts(oom) if request.is_of_host else () if device is None else device.once(parts_of_device)
    is_mapped = request.device is not None and request.device.facts.segments is not None
    context = OomContext(
        request=request,
        rerun=rerun,
        plan=analysis.once(default_plan),
        holders=holders,
        parts=parts,
        fitting=analysis.once(batch_that_fits),
        changes=analysis.once(predicted_changes),
    )
    every = fixes(context)
    largest = tuple(holder for holder in holders if holder.retained >= least)[:_HOLDERS]
    card = OomCard(
        asked=replace(
            oom, growing=growing_container(rerun) or oom.growing, had_graph=oom.had_graph or has_graph(context.request)
        ),
        device=request.name,
        parts=parts,
        limit=request.limit,
        largest_free=request.device.largest.cached if request.device is not None and is_mapped else None,
        had=request.largest_now(),
        taken=rerun.own_bytes,
        cell_took=rerun.taken if rerun.is_taken_exact else None,
        needed=None if request.nbytes is None or request.is_of_host else rerun.whole,
        holders=largest,
        held=held,
        fixes=every,
        savings=savings_of(request),
        survival=survival_of(request),
        airbag=_airbag(request, rerun, every[0]),
        notes=tuple(_notes(facts, rerun, parts)),
        is_over=_is_over(request, oom),
    )
    return _for_next_run(card) if oom.is_final else card


def _is_over(request: FailedRequest, oom: OomFact) -> bool:
    """Say whether its cell has finished since, or another cell got memory and there is enough now.

    Nothing is lacking where the error keeps no stale memory and the request has room.
    """
    analysis, graph = request.analysis, request.facts.graph
    errors = (number for number, root in enumerate(graph.roots) if root.kind == "error")
    kept = storages_of(graph, reach_of_roots(graph, errors)) & analysis.once(default_plan).storages
    room, nbytes = request.largest_now(), request.nbytes
    fits = room is None or nbytes is None or room >= nbytes
    return oom.has_passed or (oom.is_outlived and not kept and fits)


def _for_next_run(card: OomCard) -> OomCard:
    """Return the card of a process that ends, with lines for its next run, in Python, and none that frees something now."""
    return replace(
        card,
        had=None,
        holders=tuple(replace(holder, together=advice.NONE) for holder in card.holders),
        savings=card.savings and card.savings.in_python,
        survival=card.survival and card.survival.in_python,
        airbag=card.airbag and card.airbag.in_python,
    )


def _airbag(request: FailedRequest, rerun: Rerun, best: Fix) -> Advice | None:
    """Return the advice on an airbag that has twice the missing bytes, where no fix is known to be enough."""
    device = request.device
    if device is None or request.is_of_host or best.verdict is RerunVerdict.RERUN or not request.nbytes:
        return None
    there = 0 if request.oom.is_final else request.largest_now() or 0
    missing = max(request.nbytes - there, rerun.whole - (rerun.ceiling or rerun.whole))
    size = max(_LEAST_AIRBAG, 1 << max(2 * missing - 1, 1).bit_length())
    return airbag(f"{size // GiB}GiB") if size < device.facts.airbag_room else None


def out_of_memory(analysis: Analysis) -> Iterator[Finding]:
    """Yield the card in one sentence, with the request of the last error and the best remedy, until it is over."""
    card = analysis.once(build_card)
    if card is None or card.is_over:
        return
    words = f"the last error ran out of memory: {asked_words(card.asked, card.device)}"
    best = card.fixes[: 2 if card.fixes[0].verdict is RerunVerdict.NEVER else 1]  # besides things that never fit, one that may
    yield Finding("oom", joined("; ", [words, *map(_in_words, best)]) + " (" + advice.OOM.code + " says more)", advice.OOM)


def _in_words(fix: Fix) -> str:
    """Return a fix and its lines in one phrase: the lines make room for a smaller run, or have the effect themselves."""
    code = joined(", then ", (line.code for line in fix.advice))
    if not code:
        return fix.words
    return "after " + code + ", " + fix.words if fix.is_of_smaller_run else code + " " + fix.words


def asked_words(asked: OomFact, device: str) -> str:
    """Return the request in words: `it asked cuda:0 for 400 MiB`."""
    match asked.kind:
        case "worker":
            return "a DataLoader worker was killed, as happens when the host runs out of memory"
        case "shm":
            return "the shared memory that DataLoader workers use for batches was full"
    who = "a library of CUDA's" if asked.kind == "library" else "it"
    where = "the host" if asked.kind in HOST_KINDS else device
    if asked.requested is None:
        return f"{who} asked {where} for memory but does not say how much"
    return f"{who} asked {where} for {_request_words(asked)}"


def _tracked(request: FailedRequest) -> DeviceAnalysis | None:
    """Return the device whose holders are known: the one that ran out, or the host where CPU tensors are tracked."""
    if request.device is not None:
        return request.device
    return next((device for device in request.analysis.devices if device.name == request.name), None)


def _host_parts(asked: OomFact) -> tuple[Part, ...]:
    """Return the memory of the host as far as it is known: no parts of a whole, each is a bound of its own."""
    host = HostFacts() if asked.host is None else asked.host
    rows = [("memory of the machine", host.total, ""), ("available", host.available, "without swapping")]
    if host.group_limit is not None:
        rows += [("limit of the container", host.group_limit, "cgroup"), ("left in the container", host.group_room, "")]
    if host.address_limit is not None:
        rows += [("address space allowed", host.address_limit, "ulimit -v"), ("left of it", host.address_room, "")]
    if asked.kind != "host" and host.shm_total is not None:
        rows += [("shared memory", host.shm_total, "docker run --shm-size sets it"), ("free in it", host.shm_free, "")]
    return tuple(Part(name, nbytes, note) for name, nbytes, note in rows if nbytes is not None)


def _notes(facts: Facts, rerun: Rerun, parts: tuple[Part, ...]) -> Iterator[str]:
    """Yield the sentences that must be known to read the figures."""
    request, asked = rerun.request, rerun.request.oom
    if rerun.further:
        run = rerun.further[0]
        taken, more = format_bytes(run.taken), format_bytes(run.requested)
        yield f"In[{run.cell}], the same cell, got further; it held {taken} when {more} more could not be allocated"
    if asked.slack:
        yield f"the error message rounds the request, which was up to {format_bytes(asked.slack)} more"
    if asked.kind == "device" and asked.requested is not None and asked.requested <= 20 * 1024**2:
        yield "PyTorch asks for 2 MiB or 20 MiB at least, however small the tensor"
    if asked.note is not None and asked.note.unread:
        yield asked.note.unread
    if asked.kind in HOST_KINDS and facts.tracked != "cpu":
        yield f"holders of host memory are not listed, because the tensors of {facts.tracked} are tracked"
    machine = None if asked.host is None else asked.host.total
    if asked.kind == "host" and asked.requested is not None and machine is not None and asked.requested > machine:
        yield "the request exceeds the whole machine's memory, so no cleanup makes room for it"
    if asked.kind not in HOST_KINDS and request.device is None:
        yield "the error does not say which of the devices it was"
    theirs = next((part.nbytes for part in parts if part.name == DevicePart.OTHERS), 0)
    if theirs and request.device is not None:
        who = others_line(other_processes(request.device.facts, facts.pid))
        words = f"other processes held {format_bytes(theirs)} of {request.name} just now"
        yield words if asked.is_final else f"{words}; these figures assume that they take no more"
        if who:
            yield who


# --- The card after an out-of-memory error as blocks, with the request, the memory then and now, its holders, the fixes.


_EFFECTS = {
    RerunVerdict.FURTHER: "the cell gets past the line that failed, but later code may need more",
    RerunVerdict.REQUEST: "this request has room then, but the cell may take more before it",
}
"""Effects of a fix that may be enough, in the words of the answer."""


def oom_blocks(card: OomCard) -> Iterator[Block]:
    """Yield the answer, the error, all that helps, and below it the memory that this is computed from."""
    said, asked = answer(card), asked_words(card.asked, card.device)
    yield Title(said, "strong")
    yield Section(card.asked.error, _place(card))
    if said != capitalised(f"{asked}."):
        yield Line(asked)
    yield Points(tuple(map(_point, card.fixes)), "what helps", is_numbered=True)
    if card.savings is not None:
        yield Line(card.savings.code + f" {card.savings.effect}")
    if card.survival is not None:
        yield Line(card.survival.code + f" {card.survival.effect}")
    if card.airbag is not None:
        run = "a run that begins with this line" if card.asked.is_final else "such a cell"
        yield Line(f"{run} goes on in host memory, slower, with the same results: " + card.airbag.code)
    yield from (Line(sentence, "dim") for sentence in _situation(card))
    if card.holders:
        yield _holders(card)
    if card.notes:
        yield Listing(sentences=card.notes)


def answer(card: OomCard) -> str:
    """Return what to do in a sentence: the best of the fixes; nothing where the cell has run through since."""
    if card.asked.has_passed:
        return f"In[{card.asked.cell}] has run through since, so nothing has to be done."
    best = card.fixes[0]
    if card.asked.is_final:
        return _final_answer(card)
    code = joined(", then ", (line.code for line in best.advice))
    is_one = len(best.advice) == 1
    verb, *of = best.verb.split()
    frees = " ".join([f"{verb}s" if is_one else verb, *of, format_bytes(best.nbytes)])
    match best.verdict:
        case RerunVerdict.RERUN if code:
            enough = "is enough: it" if is_one else "are enough: they"
            return code + f" {enough} {frees}, and the cell gets past the line that failed."
        case RerunVerdict.FURTHER | RerunVerdict.REQUEST if code and not best.is_of_smaller_run:
            return code + f" {frees}: {_EFFECTS[best.verdict]}."
        case RerunVerdict.RERUN | RerunVerdict.NEVER | RerunVerdict.REQUEST | RerunVerdict.FURTHER:
            return capitalised(best.words) + "."
    if code and not best.is_of_smaller_run:
        return "Nothing is known to be enough: " + code + f" {frees}."
    return "Nothing is known to be enough: " + ("after " + code + ", " if code else "") + best.words + "."


def _final_answer(card: OomCard) -> str:
    """Return the failure of a process that ends in a sentence, with the request and the largest holder."""
    if card.asked.kind in HOST_KINDS or not card.holders:
        return capitalised(f"{asked_words(card.asked, card.device)}.")
    most, asked = card.holders[0], _request_words(card.asked)
    allocated = card.held if card.asked.note is None else card.asked.note.allocated
    held = f"{most.label} held {format_bytes(most.retained)} of the {format_bytes(allocated)} that was allocated"
    return f"{card.device} had no room for {asked}: {held}."


def _request_words(asked: OomFact) -> str:
    if asked.requested is None:
        return "a request"
    return f"{'about ' if asked.slack else ''}{format_bytes(asked.requested)}"


def _place(card: OomCard) -> str:
    """Return where it happened: `in In[7], line 3 of In[5]: hidden = body(x), shown as ValueError`."""
    asked, place = card.asked, ""
    if asked.line is not None:
        file = f"{asked.line.file}, " if asked.line.file else ""
        ran = f"in {file}" if asked.cell is None else f"in In[{asked.cell}], "
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
        if card.asked.is_final and (gone := card.asked.note.allocated - card.held) > card.asked.note.slack:
            yield f"{format_bytes(gone)} of the allocated memory was in no variable, and went with the operation that failed"
    if card.parts and card.asked.kind in HOST_KINDS:
        yield " · ".join(f"{part.label} {format_bytes(part.nbytes)}" for part in card.parts)
    elif card.parts and not card.asked.is_final:
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
        more = "" if card.asked.is_final else advice.REPORT.code
        rows.append(TableRow(cells=("the rest", figures[-1], "", "", "", more)))
    return holder_table([*rows, total_row(card.held)], "held" if card.asked.is_final else "frees now")


def _point(fix: Fix) -> Point:
    figures = [] if fix.nbytes is None else [format_bytes(fix.nbytes)]
    commands = joined(", then ", (line.code for line in fix.advice))
    first = "after " + commands if commands and fix.is_of_smaller_run else commands  # else they would be taken for all of it
    return Point(
        word=VERDICT_TEXTS[fix.verdict],
        what=joined(" · ", filter(None, [*figures, first])),
        lines=(fix.words, *fix.code.splitlines()),
    )
