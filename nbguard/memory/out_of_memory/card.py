"""The card after an out-of-memory error, with the request, the memory there was and is, its holders, and the fixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.cleanup.plan.default import default_plan, holders_of, parts_of_device
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice, airbag
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.breakdown import DevicePart, Part, other_processes, others_line
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.finding import Finding
from nbguard.memory.core.least_shown import least_of_rows
from nbguard.memory.core.oom_facts import HOST_KINDS, HostFacts, OomFact
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.out_of_memory.failed_request import FailedRequest
from nbguard.memory.out_of_memory.fixes import Fix, OomContext, fixes
from nbguard.memory.out_of_memory.foreseen import batch_that_fits, changes_foreseen, savings_of
from nbguard.memory.out_of_memory.rerun import Rerun, RerunVerdict
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import GiB, format_bytes

_HOLDERS = 5
_LEAST_AIRBAG = 4 * GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCard(Result):
    """The card of `%gpumem oom`. Frozen numbers and words: keeping one keeps nothing else alive. All sizes are bytes."""

    kind: ClassVar[str] = "oom_card"
    view: ClassVar[str] = "nbguard.memory.out_of_memory.card_view:oom_blocks"

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
    airbag: Advice | None  # the command that lets such a cell go on in host memory, where that is possible
    notes: tuple[str, ...]  # sentences that must be known to read the figures


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
        changes=analysis.once(changes_foreseen),
    )
    every = fixes(context)
    return OomCard(
        asked=oom,
        device=request.name,
        parts=parts,
        limit=request.limit,
        largest_free=request.device.largest.cached if request.device is not None and is_mapped else None,
        had=request.largest_now(),
        taken=rerun.own_bytes,
        cell_took=rerun.taken if rerun.is_taken_exact else None,
        needed=None if request.nbytes is None or request.is_of_host else rerun.whole,
        holders=tuple(holder for holder in holders if holder.retained >= least)[:_HOLDERS],
        held=held,
        fixes=every,
        savings=savings_of(request),
        airbag=_airbag(request, rerun, every[0]),
        notes=tuple(_notes(facts, rerun, parts)),
    )


def _airbag(request: FailedRequest, rerun: Rerun, best: Fix) -> Advice | None:
    """Return the advice on an airbag that has twice what is missing, where no fix is known to be enough."""
    device = request.device
    if device is None or request.is_of_host or best.verdict is RerunVerdict.RERUN or not request.nbytes:
        return None
    missing = max(request.nbytes - (request.largest_now() or 0), rerun.whole - (rerun.ceiling or rerun.whole))
    size = max(_LEAST_AIRBAG, 1 << max(2 * missing - 1, 1).bit_length())
    return airbag(f"{size // GiB}GiB") if size < device.facts.airbag_room else None


def out_of_memory(analysis: Analysis) -> Iterator[Finding]:
    """Yield the card in one sentence, with the request of the last error and the best remedy."""
    card = analysis.once(build_card)
    if card is None:
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
    return f"{who} asked {where} for {'about ' if asked.slack else ''}{format_bytes(asked.requested)}"


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
        yield (
            f"other processes held {format_bytes(theirs)} of {request.name} just now; these figures assume "
            "that they take no more"
        )
        if who:
            yield who
