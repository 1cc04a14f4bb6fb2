"""Fixes for a run that failed for want of memory, ranked, each with its bytes and the verdict on the cell run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from nbguard.memory.cleanup.plan.plan import Plan
from nbguard.memory.core.advice import EXPANDABLE, Advice, allow_whole_device, make_room, release_pool, release_stale, unpark
from nbguard.memory.core.analysis import DevicePart, Part, other_processes, processes_words
from nbguard.memory.core.facts import EXPERIMENT_KINDS
from nbguard.memory.core.fragmentation import fragmentation, stranded_pages
from nbguard.memory.core.references.graph import STALE_KINDS, reach_of_roots
from nbguard.memory.core.references.holders import Holder, gradient_storages, zero_gradients_of
from nbguard.memory.core.requests import SMALL_MAX
from nbguard.memory.out_of_memory.failed_request import FailedRequest, PredictedChange
from nbguard.memory.out_of_memory.release_candidates import (
    ReleaseCandidate,
    growing_container,
    leftover_names,
    parking_candidates,
    release_candidates,
    with_cleanup,
)
from nbguard.memory.out_of_memory.rerun import After, Rerun, RerunVerdict
from nbguard.memory.room.plan import plan_on_card
from nbguard.units import format_bytes

_NOTHING, _STALE, _LEFT, _AGAIN, _MOVED, _PARKED, _SMALLER, _NAMES, _OTHERS, _SETTING, _LEARNER = range(11)
"""Ranks of fixes by their cost to the user, in order: nothing; stale objects; objects that the next run makes again; ones that
a fit makes again; a move to host memory and back; a move there; another batch; data; somebody else's work; a restart; a trained
Learner.
"""
_NAMED = 3
"""Tensors of a move that are named."""
_MOST = 0.5
"""Least share of the device at which the cell itself is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One thing to do about an out-of-memory error."""

    words: str  # the effect, in a sentence without its first capital
    advice: tuple[Advice, ...]  # lines to run one after the other; none where it is nothing to run
    commands: tuple[str, ...] = field(init=False)  # the lines themselves
    nbytes: int | None  # bytes that it gives; None if it cannot be known
    enough: bool | None = field(init=False)  # by the verdict: the cell runs through; None if unknown
    loss: int = 0  # rank by its cost for the user: 0 nothing, 10 the most
    verdict: RerunVerdict  # the cell run again from its first line afterwards
    code: str = ""  # lines of Python that make the change, to be run after those of the advice; empty without any

    def __post_init__(self) -> None:
        """Set `enough` by the verdict and `commands` by the advice: one meaning, for those who read only that."""
        object.__setattr__(self, "commands", tuple(line.command for line in self.advice))
        object.__setattr__(self, "enough", self.verdict.is_enough)

    @property
    def is_of_smaller_run(self) -> bool:
        """Say whether another run is proposed, which asks for less: its lines only make room for it."""
        return self.loss == _SMALLER

    @property
    def verb(self) -> str:
        """Return the word for the lines' doing with `nbytes`, in the plural: a move gives nothing back."""
        return "make room for" if self.loss == _MOVED else "free"


@dataclass(frozen=True, kw_only=True)
class OomContext:
    """All that the fixes of one error are computed from."""

    request: FailedRequest  # that failed
    rerun: Rerun  # of the cell that made it
    plan: Plan  # the default cleanup
    holders: tuple[Holder, ...]  # of bytes where the request was made
    parts: tuple[Part, ...]  # of that device, or of the host
    fitting: int | None = None  # batch size that the fit is predicted to run with after the cleanup; None if unknown
    changes: tuple[PredictedChange, ...] = ()  # to the fit, predicted after the cleanup

    @property
    def after_cleanup(self) -> After:
        """Return the device after the default cleanup."""
        return After(freed=self.plan.storages, pools=self.plan.pools, is_emptied=True)

    @property
    def largest_after_cleanup(self) -> int | None:
        """Return the largest request that would succeed after the default cleanup, in bytes."""
        return self.largest(self.after_cleanup)

    def largest(self, after: After) -> int | None:
        """Return the largest request that would succeed then, in bytes."""
        return self.request.largest(after.freed, after.pools, is_emptied=after.is_emptied, limited=after.is_limited)

    @cached_property
    def verdict_now(self) -> RerunVerdict:
        """Return the verdict on a rerun of the cell as things are."""
        return self.rerun.verdict(After(freed=frozenset()))

    @cached_property
    def verdict_after_cleanup(self) -> RerunVerdict:
        """Return the verdict on a rerun of the cell after the default cleanup."""
        return self.rerun.verdict(self.after_cleanup)

    @cached_property
    def leftovers(self) -> tuple[str, ...]:
        """Return the names that still hold memory and that the next run makes again."""
        return leftover_names(self.rerun)

    @cached_property
    def base(self) -> ReleaseCandidate:
        """Return the fixes that cost only objects that the next run makes again, which come with every other fix."""
        return with_cleanup(self.rerun, self.leftovers)

    @property
    def base_advice(self) -> tuple[Advice, ...]:
        """Return the lines of `base`, if there is anything to free, and a process to do it."""
        return self.base.advice if self.base.after.freed and not self.request.oom.is_final else ()

    @property
    def is_mostly_the_cell(self) -> bool:
        """Say whether the cell itself had allocated most of the device."""
        whole = self.rerun.ceiling
        most = max((run.taken + run.requested for run in self.rerun.further), default=0)
        most = max(most, self.rerun.taken + self.request.nbytes_with_segment)
        return bool(whole) and most > _MOST * (whole or 0)


def fixes(context: OomContext) -> tuple[Fix, ...]:
    """Return the fixes: those that are enough for the same run first, then the rest, each with the least loss first.

    Where nothing can be enough, that comes first, and nothing ever stands above a fix that is enough. A parking comes next,
    then a smaller batch where the cell takes most of the device, which stands above the rest where an earlier run needed more
    than the device has.
    """
    if context.request.oom.is_final:
        return _of_next_run(context)
    if context.rerun.can_never_fit:
        every = [fix for rule in (_never, _smaller, _cleanup, _leftovers, _fragmented) for fix in rule(context)]
        return tuple(sorted(every, key=lambda fix: fix.verdict is not RerunVerdict.NEVER))
    rules = (
        _again,
        _cleanup,
        _leftovers,
        _gradients,
        _pools,
        _limit,
        _moving,
        _parking,
        _names,
        _others,
        _fragmented,
        _smaller,
    )
    every = [fix for rule in rules for fix in rule(context)]

    has_enough = any(fix.verdict is RerunVerdict.RERUN for fix in every)

    def place(fix: Fix) -> tuple[int, int]:
        if fix.verdict is RerunVerdict.RERUN:
            return 0, fix.loss
        if fix.loss == _PARKED and has_enough:
            return 1, _NOTHING  # it is undone, a deletion is not
        if fix.loss == _SMALLER and context.is_mostly_the_cell:
            return 1 if has_enough or context.rerun.has_outgrown else 2, fix.loss
        is_free = fix.verdict is RerunVerdict.REQUEST and (fix.loss <= _LEFT or fix.loss == _MOVED)
        return 2 if is_free else 3, fix.loss

    return tuple(_as_known(context, fix) for fix in sorted(every, key=place))


def _of_next_run(context: OomContext) -> tuple[Fix, ...]:
    """Return the fixes where the process ends, which change its next run alone, as nothing can be let go of any more."""
    rules = (_limit, _others, _fragmented, _smaller)
    changes = (replace(fix, verdict=RerunVerdict.UNKNOWN) for rule in rules for fix in rule(context))
    never = _never(context) if context.rerun.can_never_fit else ()
    return (*never, *sorted(changes, key=lambda fix: fix.loss))


def _as_known(context: OomContext, fix: Fix) -> Fix:
    """Return a fix that is no longer called enough where the cell may allocate more after the request that failed."""
    is_open = context.request.oom.goes_on or (context.request.oom.elements is not None and not context.rerun.is_list_known)
    return replace(fix, verdict=RerunVerdict.FURTHER) if is_open and fix.verdict is RerunVerdict.RERUN else fix


def _never(context: OomContext) -> Iterator[Fix]:
    """Yield that the device is too small for the cell as it is."""
    rerun, request = context.rerun, context.request
    asked, ceiling = request.oom.requested or 0, format_bytes(rerun.ceiling or 0)
    before = rerun.needed_before
    if before is not None and (before.needed or 0) > rerun.whole:
        words = f"In[{before.cell}], the same cell, needed {format_bytes(before.needed or 0)} at the same time"
    elif request.oom.elements and rerun.whole == request.oom.elements * asked:
        words = f"the {request.oom.elements} elements of the list take {format_bytes(rerun.whole)}"
    elif rerun.whole > asked:
        words = f"the cell itself needs {format_bytes(rerun.whole)} at the same time, this request among it"
    else:
        words = f"{format_bytes(asked)} is asked for"
    words += f", and PyTorch can have {ceiling} of {request.name} at most, so "
    words += "the next run fails, too" if request.oom.is_final else "the same cell fails again whatever is freed"
    yield Fix(words=words, advice=(), nbytes=None, verdict=RerunVerdict.NEVER, loss=_NOTHING)


def _again(context: OomContext) -> Iterator[Fix]:
    """Yield that there is room already: for the whole run again, while the old one's error still holds its memory."""
    request, largest = context.request, context.request.largest_now()
    verdict = context.verdict_now
    if verdict is RerunVerdict.RERUN:
        words = f"{format_bytes(largest or 0)} can be allocated now: run it again"
    elif not context.plan.storages and verdict is RerunVerdict.REQUEST and request.would_succeed():
        words = f"{format_bytes(largest or 0)} can be allocated now, enough for a run that needs no more in total"
    else:
        return
    yield Fix(words=words, advice=(), nbytes=largest, verdict=verdict, loss=_NOTHING)


def _cleanup(context: OomContext) -> Iterator[Fix]:
    """Yield the default cleanup, if it gives anything back."""
    request, plan = context.request, context.plan
    freed, before, after = request.nbytes_here(plan.storages), request.largest_now(), context.largest_after_cleanup
    gain = freed or (0 if before is None or after is None else after - before)
    verdict = context.verdict_after_cleanup
    if not gain and verdict is RerunVerdict.RERUN and context.verdict_now is not RerunVerdict.RERUN:
        gain = request.releasable  # an empty cache gives the next run the first one's state
    if not gain or (request.is_of_host and not freed):
        return
    is_as_now = after is not None and after == before and verdict is context.verdict_now
    if is_as_now and gain < SMALL_MAX < (request.smallest.nbytes or 0):
        return  # small blocks serve no such request
    own = request.nbytes_here(context.rerun.own & plan.storages)
    words = "frees stale memory" if freed else "gives the empty cache back to the driver"
    if after is not None:
        words += f"; {format_bytes(after)} can be allocated then"
    if verdict is RerunVerdict.SHORT and own and after is not None and request.nbytes is not None:
        words += f", for a smaller run (this one took {format_bytes(own)} of that itself)"
    elif verdict is RerunVerdict.SHORT and after is not None and (missing := request.nbytes_with_segment - after) > 0:
        words += f", {format_bytes(missing)} too little"
    elif verdict is RerunVerdict.REQUEST:
        words += _not_known(context)
    yield Fix(words=words, advice=(release_stale(),), nbytes=gain, verdict=verdict, loss=_STALE)


def _not_known(context: OomContext) -> str:
    """Return the reason not to call a fix enough."""
    if context.rerun.further:
        return f"; In[{context.rerun.further[0].cell}], the same cell, failed further on"
    if context.rerun.taken:
        return "; the cell's earlier allocations may then be placed differently, or be larger"
    return "; whether the cell takes more before this request is not known"


def _leftovers(context: OomContext) -> Iterator[Fix]:
    """Yield the names that the failed run left, and that its next run makes again."""
    if not context.leftovers or context.verdict_after_cleanup is RerunVerdict.RERUN:
        return
    base = context.base
    largest = format_bytes(context.largest(base.after) or 0)
    names = ", ".join(context.leftovers)
    words = f"releases {names}, which the same cell makes again; {largest} can be allocated then"
    nbytes = context.request.nbytes_here(base.after.freed)
    if base.verdict is RerunVerdict.REQUEST:
        words += _not_known(context)
    elif base.verdict is RerunVerdict.SHORT:
        words += ", for a smaller run"
    yield Fix(words=words, advice=base.advice, nbytes=nbytes, verdict=base.verdict, loss=_LEFT)


def _gradients(context: OomContext) -> Iterator[Fix]:
    """Yield the gradients of idle Learners, but not of the one that failed: its next step makes them again."""
    request, base = context.request, context.base
    graph, asked = request.facts.graph, request.oom
    for label, node, storages in gradient_storages(request.facts):
        nbytes = request.nbytes_here(storages - base.after.freed)
        if nbytes and graph.nodes[node].ref != asked.learner and label not in context.leftovers:
            is_emptied = bool(context.base_advice)
            after = replace(base.after, freed=base.after.freed | storages, is_emptied=is_emptied)
            yield Fix(
                words=f"frees the gradients of {label}; its next fit makes new ones",
                advice=(zero_gradients_of(request.facts, label), *context.base_advice),
                nbytes=nbytes,
                verdict=context.rerun.verdict(after),
                loss=_AGAIN,
            )


def _limit(context: OomContext) -> Iterator[Fix]:
    """Yield the memory fraction, if the driver has more than it allows."""
    request = context.request
    within = replace(context.base.after, is_emptied=bool(context.base_advice))  # by the cleanup that goes with it
    beyond = replace(within, is_limited=False)
    with_it, without = context.largest(within), context.largest(beyond)
    if request.limit is None or with_it is None or without is None or without <= with_it:
        return
    limit, largest = format_bytes(request.limit), format_bytes(without)
    words = f"lifts the limit of {limit} that a memory fraction sets; {largest} can be allocated then"
    yield Fix(
        words=words,
        advice=(allow_whole_device(request.name), *context.base_advice),
        nbytes=without - with_it,
        verdict=context.rerun.verdict(beyond),
        loss=_AGAIN,
    )


def _needs_names(context: OomContext) -> bool:
    """Say whether anything of the user's need be touched at all."""
    return (
        context.request.nbytes is not None
        and context.verdict_after_cleanup is not RerunVerdict.RERUN
        and context.base.verdict is not RerunVerdict.RERUN
    )


def _worthwhile(context: OomContext, candidates: tuple[ReleaseCandidate, ...]) -> tuple[ReleaseCandidate, ...]:
    """Return the candidates, but the first alone where the cell takes most of the device and each makes room for a request."""
    is_enough = any(candidate.verdict is RerunVerdict.RERUN for candidate in candidates)
    return candidates if is_enough or not context.is_mostly_the_cell else candidates[:1]


def _moving(context: OomContext) -> Iterator[Fix]:
    """Yield a move of live tensors out and back, which puts free pieces together, where the model proves it enough."""
    request, base = context.request, context.base
    if request.device is None or request.oom.kind != "device" or request.nbytes is None or not _needs_names(context):
        return
    plan = plan_on_card(request.analysis, request.device, request.nbytes, base.after.freed)
    if plan is None or plan.state != "planned":
        return
    names = ", ".join(each.name for each in plan.moves[:_NAMED]) + (" and others" if len(plan.moves) > _NAMED else "")
    words = (
        f"moves {format_bytes(plan.nbytes)} ({names}) to host memory and back; {format_bytes(plan.free)} is free in pieces, "
        f"and {format_bytes(request.nbytes)} fits then"
    )
    lines = (*context.base_advice, make_room(request.nbytes))
    verdict = RerunVerdict.RERUN if context.rerun.is_first_request else RerunVerdict.REQUEST
    yield Fix(words=words, advice=lines, nbytes=request.nbytes, verdict=verdict, loss=_MOVED)


def _parking(context: OomContext) -> Iterator[Fix]:
    """Yield the names that could wait in host memory meanwhile."""
    if not _needs_names(context):
        return
    for candidate in _worthwhile(context, parking_candidates(context.rerun, context.holders, context.leftovers)):
        largest = format_bytes(context.largest(candidate.after) or 0)
        words = f"moves {', '.join(candidate.names)} to host memory; {largest} can be allocated then, and "
        words += unpark(candidate.names).code + " brings it back; memory shared with something outside Python stays"
        nbytes = context.request.nbytes_here(candidate.after.freed)
        yield Fix(words=words, advice=candidate.advice, nbytes=nbytes, verdict=candidate.verdict, loss=_PARKED)


def _names(context: OomContext) -> Iterator[Fix]:
    """Yield the user's own names that make up for the rest, and that the failed run does not need."""
    if not _needs_names(context):
        return
    whats = {name: holder.what for holder in context.holders for name in holder.names}
    for candidate in _worthwhile(context, release_candidates(context.rerun, context.holders, context.leftovers)):
        what = ", ".join(f"{name} ({whats[name]})" if whats.get(name) else name for name in candidate.names)
        what += ", which the rest of the cell replaces" if {*candidate.names} <= {*context.request.oom.replaces} else ""
        if context.leftovers and any(name in line.targets for line in candidate.advice for name in context.leftovers):
            what += f", and {', '.join(context.leftovers)}, which the same cell makes again"
        own = context.request.nbytes_here(candidate.after.freed & context.plan.storages)
        what += f", and {format_bytes(own)} that are stale" if own else ""
        largest = format_bytes(context.largest(candidate.after) or 0)
        words = f"releases {what}; {largest} can be allocated then"
        words += _not_known(context) if candidate.verdict is RerunVerdict.REQUEST else ""
        yield Fix(
            words=words,
            advice=candidate.advice,
            nbytes=context.request.nbytes_here(candidate.after.freed),
            verdict=candidate.verdict,
            loss=_LEARNER if candidate.has_learner else _NAMES,
        )


def _pools(context: OomContext) -> Iterator[Fix]:
    """Yield the unused memory in pools of other libraries that they can give back, if it would be enough."""
    device = context.request.device
    if device is None:
        return
    for pool in device.facts.library_pools:
        verdict = context.rerun.verdict(replace(context.base.after, is_emptied=True, more=pool.returnable))
        if not pool.returnable or verdict is RerunVerdict.SHORT:
            continue
        nbytes, release = pool.returnable, release_pool(pool.library, pool.release)
        words = f"{pool.library} gives back up to {format_bytes(nbytes)} of {device.name} that it keeps for later arrays"
        yield Fix(words=words, advice=(*context.base_advice, release), nbytes=nbytes, verdict=verdict, loss=_NOTHING)


def _others(context: OomContext) -> Iterator[Fix]:
    """Yield the memory of other processes, if it would be enough."""
    request, device = context.request, context.request.device
    theirs = next((part.nbytes for part in context.parts if part.name == DevicePart.OTHERS), 0)
    is_final = request.oom.is_final
    if device is None or not theirs or not (is_final or context.verdict_after_cleanup is RerunVerdict.SHORT):
        return
    verdict = context.rerun.verdict(replace(context.base.after, is_emptied=True, more=theirs))
    if request.missing <= theirs if is_final else verdict is not RerunVerdict.SHORT:
        who = processes_words(other_processes(device.facts, request.facts.pid))
        words = f"other processes hold {format_bytes(theirs)} of {device.name}: {who}; it is free when they end"
        yield Fix(words=words, advice=context.base_advice, nbytes=theirs, verdict=verdict, loss=_OTHERS)


def _fragmented(context: OomContext) -> Iterator[Fix]:
    """Yield the setting that keeps free memory in one piece, if there was enough of it, in pieces."""
    request, note = context.request, context.request.oom.note
    device, need = request.device, request.nbytes
    if device is None or need is None or context.request.facts.tracked != "cuda":
        return
    if device.room.is_expandable or not device.facts.can_expand:
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
    is_small = largest <= SMALL_MAX < need  # the pieces are of the small pool, which serves no such request
    if max(free, largest) < need <= free + stranded and not is_small:
        again = f"at least {format_bytes(pages)} of it" if pages else "a part of it"
        words = (
            f"fragmentation: {format_bytes(free + stranded)} was free in all, {format_bytes(stranded)} of it in pieces between "
            f"live blocks. In the environment before CUDA starts, this lets {again} be used again; a replay says how much"
        )
        yield Fix(words=words, advice=(EXPANDABLE,), nbytes=pages or None, verdict=RerunVerdict.UNKNOWN, loss=_SETTING)


def _nothing_went(context: OomContext) -> bool:
    """Say whether the device is as it was at the failure, as far as figures tell."""
    note, since = context.request.oom.note, context.rerun.since
    return since is not None and since <= (0 if note is None else 2 * note.slack)


def _less_kept(context: OomContext) -> Iterator[Fix]:
    """Yield fixes that keep less where a batch is not to blame, as with a growing list or unused graphs."""
    oom = context.request.oom
    if oom.kind not in ("device", "library"):
        return
    left, runs_model = growing_container(context.rerun), bool(oom.runs_model or oom.learner)
    growing = left or oom.growing
    if growing is not None and (growing.less or runs_model):
        words = growing.words(trains=oom.trains, is_left=left is not None)
        yield Fix(words=words, advice=(), nbytes=None, verdict=RerunVerdict.UNKNOWN, loss=_SMALLER)
    if not runs_model:
        return
    if not oom.trains and (oom.had_graph or has_graph(context.request)):
        words = "under torch.no_grad() the cell keeps no graph, and nothing here calls backward"
        yield Fix(words=words, advice=(), nbytes=None, verdict=RerunVerdict.UNKNOWN, loss=_SMALLER)


def has_graph(request: FailedRequest) -> bool:
    """Say whether the failed run holds an autograd graph."""
    graph, oom = request.facts.graph, request.oom
    roots = (n for n, root in enumerate(graph.roots) if root.kind == "error" or root.label in oom.bound)
    return any(graph.nodes[node].kind == "graph" for node in reach_of_roots(graph, roots))


def _smaller(context: OomContext) -> Iterator[Fix]:
    """Yield asking for less; by how much only where the Learner that failed is known to have held the rest in its batch.

    Not where something else is to blame (`_less_kept`).
    """
    if less := list(_less_kept(context)):
        yield from less
        return
    request, rerun, largest = context.request, context.rerun, context.largest_after_cleanup
    kinds = {"host": "a smaller array or batch", "worker": "fewer or no workers (num_workers=0), or a smaller batch"}
    kinds["shm"] = "fewer or no workers (num_workers=0), or a smaller batch"
    has_batch = request.oom.runs_model or bool(request.oom.learner)
    training = "a smaller batch, mixed precision or gradient accumulation" if request.oom.trains else "a smaller batch or dtype"
    words = kinds.get(request.oom.kind, training if has_batch else "a smaller tensor, or a smaller dtype,")
    batch, need = request.oom.batch_size, request.nbytes
    if context.fitting and batch:
        words = f"a batch of {context.fitting} instead of {batch} fits (predicted)"
        yield Fix(words=words, advice=(release_stale(),), nbytes=None, verdict=RerunVerdict.UNKNOWN, loss=_SMALLER)
        yield from map(_change, context.changes)
        return
    if request.oom.kind == "device" and need and largest and batch and rerun.since is not None and _keeps_its_learner(context):
        whole = rerun.own_bytes + rerun.since + need
        parts = 1
        while whole > largest * parts and parts < batch:
            parts *= 2
        if 1 < parts <= batch and rerun.own_bytes:
            words = (
                f"a batch of {batch // parts} instead of {batch} gets here with some {format_bytes(whole // parts)} instead of "
                f"{format_bytes(whole)}; later code may need more"
            )
            gain = whole - whole // parts
            yield Fix(words=words, advice=(release_stale(),), nbytes=gain, verdict=RerunVerdict.UNKNOWN, loss=_SMALLER)
            return
    depends = "; how much less depends on the model" if has_batch and request.oom.kind in ("device", "library") else ""
    yield Fix(words=f"{words} asks for less{depends}", advice=(), nbytes=None, verdict=RerunVerdict.UNKNOWN, loss=_SMALLER)


def _change(change: PredictedChange) -> Fix:
    verdict = RerunVerdict.SHORT if change.fits is False else RerunVerdict.UNKNOWN
    return Fix(
        words=change.words, advice=(release_stale(),), nbytes=change.saved, verdict=verdict, code=change.code, loss=_SMALLER
    )


def _keeps_its_learner(context: OomContext) -> bool:
    """Say whether the Learner that failed is one that a name keeps and that the run did not make itself."""
    graph, asked = context.request.facts.graph, context.request.oom
    roots = (n for n, root in enumerate(graph.roots) if root.kind not in STALE_KINDS and root.label not in asked.bound)
    return any(
        graph.nodes[node].ref == asked.learner and graph.nodes[node].kind in EXPERIMENT_KINDS
        for node in reach_of_roots(graph, roots)
    )
