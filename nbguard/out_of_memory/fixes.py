"""Fixes that would let a failed request through, ranked: each with the bytes it gives, computed from the plans of a cleanup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.cleanup.plan.plan import Plan
from nbguard.memory.breakdown import DevicePart, Part
from nbguard.memory.facts import EXPERIMENT_KINDS
from nbguard.memory.references.gradients import gradient_storages, zero_grad
from nbguard.memory.references.graph import STALE_KINDS, reach_of_roots
from nbguard.memory.references.holders import Holder
from nbguard.memory.segments.fragmentation import fragmentation, stranded_pages
from nbguard.out_of_memory.failed_request import FailedRequest, FailedRunUsage
from nbguard.out_of_memory.release_candidates import ReleaseCandidate, release_candidates
from nbguard.units import format_bytes

CLEANUP = "%reset_gpu"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One thing to do about an out-of-memory error."""

    words: str  # the effect, in a sentence without its first capital
    commands: tuple[str, ...]  # lines to run one after the other; none where it is nothing to run
    nbytes: int | None  # bytes that it gives; None: cannot be known
    enough: bool | None  # the same run would succeed then; None: not known
    loss: int = 0  # rank by what it costs the user: 0 nothing, 9 the most


@dataclass(frozen=True, slots=True, kw_only=True)
class OomContext:
    """All that the fixes of one error are computed from."""

    request: FailedRequest  # that failed
    usage: FailedRunUsage  # of the run that made it
    plan: Plan  # the default cleanup
    holders: tuple[Holder, ...]  # of bytes where the request was made
    parts: tuple[Part, ...]  # of that device, or of the host

    @property
    def largest_after_cleanup(self) -> int | None:
        """Return the largest request that would succeed after the default cleanup, in bytes."""
        return self.request.largest(self.plan.storages, self.plan.pools, is_emptied=True)

    @property
    def enough_after_cleanup(self) -> bool | None:
        """Say whether the same run would succeed after the default cleanup."""
        return self.usage.would_succeed(self.request, self.plan.storages, self.plan.pools, is_emptied=True)


def fixes(context: OomContext) -> tuple[Fix, ...]:
    """Return the fixes: those that are enough for the same run first, then the rest, each cheapest in what is lost first."""
    rules = (_again, _cleanup, _gradients, _limit, _names, _others, _fragmented, _smaller)
    every = [fix for rule in rules for fix in rule(context)]
    return tuple(sorted(every, key=lambda fix: (fix.enough is not True, fix.loss)))


def _again(context: OomContext) -> Iterator[Fix]:
    """Yield that there is room already: for the whole run again, while the old one's error still holds what it had taken."""
    request, largest = context.request, context.request.largest_now()
    if context.usage.would_succeed_again(request):
        yield Fix(words=f"{format_bytes(largest or 0)} can be had now: run it again", commands=(), nbytes=largest, enough=True)
    elif not context.plan.storages and request.would_succeed():
        yield Fix(
            words=f"{format_bytes(largest or 0)} can be had now, for a run that needs no more in all",
            commands=(),
            nbytes=largest,
            enough=None,
        )


def _cleanup(context: OomContext) -> Iterator[Fix]:
    """Yield the default cleanup, if it gives anything back."""
    request, plan = context.request, context.plan
    freed, before, after = request.nbytes_here(plan.storages), request.largest_now(), context.largest_after_cleanup
    gain = freed or (0 if before is None or after is None else after - before)
    if not gain or (request.is_of_host and not freed):
        return
    enough = context.enough_after_cleanup
    own = request.nbytes_here(context.usage.own & plan.storages)
    words = "frees what is stale" if freed else "gives the empty cache back to the driver"
    if after is not None:
        words += f"; {format_bytes(after)} can be had then"
    if enough:
        words += ": the same run gets past this"
    elif own and after is not None and request.nbytes is not None:
        words += f", for a smaller run: this one had taken {format_bytes(own)} of that itself"
    elif enough is False and after is not None and (missing := request.nbytes_with_segment - after) > 0:
        words += f", {format_bytes(missing)} too little"
    yield Fix(words=words, commands=(CLEANUP,), nbytes=gain, enough=enough, loss=1)


def _gradients(context: OomContext) -> Iterator[Fix]:
    """Yield the gradients of idle Learners, but not of the one that failed: its next step makes them again."""
    graph, asked = context.request.facts.graph, context.request.oom
    for label, node, storages in gradient_storages(context.request.facts):
        nbytes = context.request.nbytes_here(storages)
        if nbytes and graph.nodes[node].ref != asked.learner:
            freed, pools, is_emptied = context.plan.storages | storages, context.plan.pools, bool(context.plan.storages)
            enough = context.usage.would_succeed(context.request, freed, pools, is_emptied=is_emptied)
            commands = (zero_grad(label), *_and_cleanup(context))
            yield Fix(
                words=f"frees the gradients of {label}; its next fit makes new ones",
                commands=commands,
                nbytes=nbytes,
                enough=enough,
                loss=2,
            )


def _and_cleanup(context: OomContext) -> tuple[str, ...]:
    return (CLEANUP,) if context.plan.storages else ()


def _limit(context: OomContext) -> Iterator[Fix]:
    """Yield the memory fraction, if the driver has more than it allows."""
    request, storages, pools = context.request, context.plan.storages, context.plan.pools
    is_emptied = bool(storages)  # by the cleanup that goes with it
    with_it, without = (request.largest(storages, pools, is_emptied=is_emptied, limited=is_on) for is_on in (True, False))
    if request.limit is None or with_it is None or without is None or without <= with_it:
        return
    enough = context.usage.would_succeed(request, storages, pools, is_emptied=is_emptied, limited=False)
    limit, largest = format_bytes(request.limit), format_bytes(without)
    words = f"lifts the limit of {limit} that a memory fraction sets; {largest} can be had then"
    line = f"torch.cuda.set_per_process_memory_fraction(1.0, '{request.name}')"
    yield Fix(words=words, commands=(line, *_and_cleanup(context)), nbytes=without - with_it, enough=enough, loss=3)


def _names(context: OomContext) -> Iterator[Fix]:
    """Yield the user's own names that make up for the rest, and that the failed run does not need."""
    if context.request.nbytes is None or context.enough_after_cleanup:
        return
    whats = {name: holder.what for holder in context.holders for name in holder.names}
    for candidate in release_candidates(context.request, context.usage, context.holders):
        yield _name_fix(context.request, candidate, whats)


def _name_fix(request: FailedRequest, candidate: ReleaseCandidate, whats: dict[str, str]) -> Fix:
    commands = (f"{CLEANUP} {' '.join(candidate.names)}", *((CLEANUP,) if candidate.and_cleanup else ()))
    what = ", ".join(dict.fromkeys(whats.get(name, "") or name for name in candidate.names))
    largest = format_bytes(request.largest(candidate.freed, candidate.pools, is_emptied=True) or 0)
    return Fix(
        words=f"lets go of {what}; {largest} can be had then: the same run gets past this",
        commands=commands,
        nbytes=request.nbytes_here(candidate.freed),
        enough=candidate.enough,
        loss=3 + len(candidate.names),
    )


def _others(context: OomContext) -> Iterator[Fix]:
    """Yield the memory of other processes, if it would be enough."""
    request, plan, device = context.request, context.plan, context.request.device
    theirs = next((part.nbytes for part in context.parts if part.name == DevicePart.OTHERS), 0)
    if device is None or not theirs or context.enough_after_cleanup is not False:
        return
    enough = context.usage.would_succeed(request, plan.storages, plan.pools, is_emptied=True, more=theirs)
    if enough is not False:
        listed = () if device.facts.nvml is None else device.facts.nvml.processes or ()
        pids = [f"{p.pid} ({format_bytes(p.used)})" for p in listed if p.pid != request.facts.pid]
        words = f"other processes hold {format_bytes(theirs)} of {device.name}: pid {', '.join(pids)}"
        yield Fix(words=f"{words}; it is free when they end", commands=(), nbytes=theirs, enough=enough, loss=6)


def _fragmented(context: OomContext) -> Iterator[Fix]:
    """Yield the setting that keeps free memory in one piece, if there was enough of it, in pieces."""
    request, note = context.request, context.request.oom.note
    device, need = request.device, request.nbytes
    if device is None or need is None or device.room.is_expandable or context.request.facts.tracked != "cuda":
        return
    if note is not None and note.stranded is not None:
        free, stranded, pages, largest = note.free, note.stranded, note.pages or 0, note.largest_free or 0
        free = free if note.limit is None else min(free, note.limit - note.reserved)
    elif device.facts.free is not None and device.facts.segments is not None and _nothing_went(context):
        ordinary = [segment for segment in device.facts.segments if not segment.is_private]
        space, pages = fragmentation(ordinary), stranded_pages(ordinary)
        free, stranded, largest = device.facts.free + space.releasable, space.stranded, device.largest.cached
        free = free if request.limit is None else min(free, request.limit - device.space.reserved + space.releasable)
    else:
        return
    if max(free, largest) < need <= free + stranded:
        again = f"at least {format_bytes(pages)} of it" if pages else "a part of it"
        words = (
            f"fragmentation: {format_bytes(free + stranded)} was free in all, {format_bytes(stranded)} of it in pieces between "
            f"live blocks. In the environment before CUDA starts, this lets {again} be used again; a replay says how much"
        )
        yield Fix(words=words, commands=(EXPANDABLE,), nbytes=pages or None, enough=None, loss=8)


def _nothing_went(context: OomContext) -> bool:
    """Say whether the device is as it was at the failure, as far as figures tell."""
    note, since = context.request.oom.note, context.usage.since
    return since is not None and since <= (0 if note is None else 2 * note.slack)


def _smaller(context: OomContext) -> Iterator[Fix]:
    """Yield asking for less; by how much only where the Learner that failed is known to have held the rest in its batch."""
    request, usage, largest = context.request, context.usage, context.largest_after_cleanup
    kinds = {"host": "a smaller array or batch", "worker": "fewer or no workers (num_workers=0), or a smaller batch"}
    kinds["shm"] = "fewer or no workers (num_workers=0), or a smaller batch"
    words = kinds.get(request.oom.kind, "a smaller batch, mixed precision or gradient accumulation")
    batch, need = request.oom.batch_size, request.nbytes
    if request.oom.kind == "device" and need and largest and batch and usage.since is not None and _keeps_its_learner(context):
        whole = usage.nbytes + usage.since + need
        parts = 1
        while whole > largest * parts and parts < batch:
            parts *= 2
        if 1 < parts <= batch and usage.nbytes:
            words = (
                f"a batch of {batch // parts} instead of {batch} gets here with some {format_bytes(whole // parts)} instead of "
                f"{format_bytes(whole)}; what comes later may need more"
            )
            yield Fix(words=words, commands=(CLEANUP,), nbytes=whole - whole // parts, enough=None, loss=7)
            return
    depends = "; how much less depends on the model" if request.oom.kind in ("device", "library") else ""
    yield Fix(words=f"{words} asks for less{depends}", commands=(), nbytes=None, enough=None, loss=7)


def _keeps_its_learner(context: OomContext) -> bool:
    """Say whether the Learner that failed is one that a name keeps and that the run did not make itself."""
    graph, asked = context.request.facts.graph, context.request.oom
    roots = (n for n, root in enumerate(graph.roots) if root.kind not in STALE_KINDS and root.label not in asked.bound)
    return any(
        graph.nodes[node].ref == asked.learner and graph.nodes[node].kind in EXPERIMENT_KINDS
        for node in reach_of_roots(graph, roots)
    )
