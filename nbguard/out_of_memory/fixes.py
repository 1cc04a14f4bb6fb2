"""What would let a failed request through, ranked: each with the bytes it gives, computed from the same plans as a cleanup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.cleanup.plan.plan import Plan
from nbguard.memory.breakdown import Part
from nbguard.memory.facts import EXPERIMENT_KINDS
from nbguard.memory.fragmentation import fragmentation, stranded_pages
from nbguard.memory.gradients import gradient_storages, zero_grad
from nbguard.memory.graph import STALE_KINDS, Holder, reach_of_roots
from nbguard.memory.oom_facts import HOST_KINDS
from nbguard.out_of_memory.candidates import Sacrifice, sacrifices
from nbguard.out_of_memory.need import FailedRun, Space
from nbguard.units import format_bytes

CLEANUP = "%reset_gpu"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One thing to do. `nbytes` it gives, None if that cannot be known; `enough` for the same run, None likewise.

    `commands` are to be run one after the other; none where it is no command of nbguard's. `loss` orders fixes by what they
    cost: 0 nothing, 9 the most.
    """

    words: str
    commands: tuple[str, ...]
    nbytes: int | None
    enough: bool | None
    loss: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that the fixes of one error are computed from."""

    space: Space
    run: FailedRun
    plan: Plan
    rows: tuple[Holder, ...]
    parts: tuple[Part, ...]

    @property
    def had(self) -> int | None:
        """Return what can be had after the default cleanup."""
        return self.space.had(self.plan.storages, self.plan.pools)


def fixes(case: Case) -> tuple[Fix, ...]:
    """Return what helps: what is enough for the same run first, then the rest, each cheapest in what is lost first."""
    found = [*_again(case), *_cleanup(case), *_gradients(case), *_limit(case), *_names(case), *_others(case)]
    found += [*_fragmented(case), *_smaller(case)]
    return tuple(sorted(found, key=lambda fix: (fix.enough is not True, fix.loss)))


def _again(case: Case) -> Iterator[Fix]:
    """Yield that there is room already: for the whole run again, while the old one's error still holds what it had taken."""
    need, had = case.space.need, case.space.now()
    if need is not None and case.run.covers(need + case.run.nbytes, had):
        yield Fix(words=f"{format_bytes(had)} can be had now: run it again", commands=(), nbytes=had, enough=True)
    elif not case.plan.storages and need is not None and had is not None and had >= need:
        yield Fix(
            words=f"{format_bytes(had)} can be had now, for a run that needs no more in all",
            commands=(),
            nbytes=had,
            enough=None,
        )


def _cleanup(case: Case) -> Iterator[Fix]:
    """Yield the default cleanup, if it gives anything back."""
    space, plan = case.space, case.plan
    freed, before, after = space.on_it(plan.storages), space.now(), case.had
    gain = freed or (0 if before is None or after is None else after - before)
    if not gain or (space.asked.kind in HOST_KINDS and not freed):
        return
    enough = case.run.passes(space, plan.storages, plan.pools)
    own = space.on_it(case.run.own & plan.storages)
    words = "frees what is stale" if freed else "gives the empty cache back to the driver"
    if after is not None:
        words += f"; {format_bytes(after)} can be had then"
    if enough:
        words += ": the same run gets past this"
    elif own and after is not None and space.need is not None:
        words += f", for a smaller run: this one had taken {format_bytes(own)} of that itself"
    elif enough is False and after is not None:
        words += f", {format_bytes((space.need or 0) - after)} too little"
    yield Fix(words=words, commands=(CLEANUP,), nbytes=gain, enough=enough, loss=1)


def _gradients(case: Case) -> Iterator[Fix]:
    """Yield the gradients of idle Learners, but not of the one that failed: its next step makes them again."""
    graph, asked = case.space.facts.graph, case.space.asked
    for label, node, storages in gradient_storages(case.space.facts):
        nbytes = case.space.on_it(storages)
        if nbytes and graph.nodes[node].ref != asked.learner:
            enough = case.run.passes(case.space, case.plan.storages | storages, case.plan.pools)
            commands = (zero_grad(label), *_and_cleanup(case))
            yield Fix(
                words=f"frees the gradients of {label}; its next fit makes new ones",
                commands=commands,
                nbytes=nbytes,
                enough=enough,
                loss=2,
            )


def _and_cleanup(case: Case) -> tuple[str, ...]:
    return (CLEANUP,) if case.plan.storages else ()


def _limit(case: Case) -> Iterator[Fix]:
    """Yield the memory fraction, if the driver has more than it allows."""
    space, storages, pools = case.space, case.plan.storages, case.plan.pools
    with_it, without = case.had, space.had(storages, pools, limited=False)
    if space.limit is None or with_it is None or without is None or without <= with_it:
        return
    enough = case.run.covers(space.need, space.had(storages - case.run.own, pools, limited=False))
    words = (
        f"lifts the limit of {format_bytes(space.limit)} that a memory fraction sets; {format_bytes(without)} can be had then"
    )
    line = f"torch.cuda.set_per_process_memory_fraction(1.0, '{space.name}')"
    yield Fix(words=words, commands=(line, *_and_cleanup(case)), nbytes=without - with_it, enough=enough, loss=3)


def _names(case: Case) -> Iterator[Fix]:
    """Yield the user's own names that make up for the rest, and that the failed run does not need."""
    if case.space.need is None or case.run.passes(case.space, case.plan.storages, case.plan.pools):
        return
    whats = {name: row.what for row in case.rows for name in row.label.split(" = ")}
    for each in sacrifices(case.space, case.run, case.rows):
        yield _name_fix(case, each, whats)


def _name_fix(case: Case, each: Sacrifice, whats: dict[str, str]) -> Fix:
    commands = (f"{CLEANUP} {' '.join(each.names)}", *((CLEANUP,) if each.and_cleanup else ()))
    what = ", ".join(dict.fromkeys(whats.get(name, "") or name for name in each.names))
    had = case.space.had(each.freed, each.pools)
    words = f"lets go of {what}; {format_bytes(had)} can be had then: the same run gets past this"
    return Fix(
        words=words, commands=commands, nbytes=case.space.on_it(each.freed), enough=each.enough, loss=3 + len(each.names)
    )


def _others(case: Case) -> Iterator[Fix]:
    """Yield the memory of other processes, if it would be enough."""
    device = case.space.device
    theirs = next((part.nbytes for part in case.parts if part.name == "others"), 0)
    before = case.space.had(case.plan.storages - case.run.own, case.plan.pools)
    if device is None or not theirs or before is None or case.run.covers(case.space.need, before) is not False:
        return
    had = min(before + theirs, case.space.limit or before + theirs)
    enough = case.run.covers(case.space.need, had)
    if enough is not False:
        listed = () if device.nvml is None else device.nvml.processes or ()
        pids = [f"{p.pid} ({format_bytes(p.used)})" for p in listed if p.pid != case.space.facts.pid]
        words = f"other processes hold {format_bytes(theirs)} of {device.device}: pid {', '.join(pids)}"
        yield Fix(words=f"{words}; it is free when they end", commands=(), nbytes=theirs, enough=enough, loss=6)


def _fragmented(case: Case) -> Iterator[Fix]:
    """Yield the setting that keeps free memory in one piece, if there was enough of it, in pieces."""
    space, note = case.space, case.space.asked.note
    device, need = space.device, space.need
    if device is None or need is None or space.is_expandable or not space.name.startswith("cuda"):
        return
    if note is not None and note.stranded is not None:
        free, stranded, pages, largest = note.free, note.stranded, note.pages or 0, note.largest_free or 0
        free = free if note.limit is None else min(free, note.limit - note.reserved)
    elif device.free is not None and device.segments is not None and _nothing_went(case):
        ordinary = [segment for segment in device.segments if not segment.is_private]
        found, pages = fragmentation(ordinary), stranded_pages(ordinary)
        free, stranded, largest = device.free + found.releasable, found.stranded, found.largest_free
        reserved = sum(segment.total_size for segment in device.segments)
        free = free if space.limit is None else min(free, space.limit - reserved + found.releasable)
    else:
        return
    if max(free, largest) < need <= free + stranded:
        again = f"at least {format_bytes(pages)} of it" if pages else "a part of it"
        words = (
            f"fragmentation: {format_bytes(free + stranded)} was free in all, {format_bytes(stranded)} of it in pieces between "
            f"live blocks. In the environment before CUDA starts, this lets {again} be used again; a replay says how much"
        )
        yield Fix(words=words, commands=(EXPANDABLE,), nbytes=pages or None, enough=None, loss=8)


def _nothing_went(case: Case) -> bool:
    """Say whether the device is as it was at the failure, as far as figures tell."""
    note, since = case.space.asked.note, case.run.since
    return since is not None and since <= (0 if note is None else 2 * note.slack)


def _smaller(case: Case) -> Iterator[Fix]:
    """Yield asking for less; by how much only where the Learner that failed is known to have held the rest in its batch."""
    space, run, had = case.space, case.run, case.had
    kinds = {"host": "a smaller array or batch", "worker": "fewer or no workers (num_workers=0), or a smaller batch"}
    kinds["shm"] = "fewer or no workers (num_workers=0), or a smaller batch"
    words = kinds.get(space.asked.kind, "a smaller batch, mixed precision or gradient accumulation")
    batch, need = space.asked.batch_size, space.need
    if space.asked.kind == "device" and need and had and batch and run.since is not None and _keeps_its_learner(case):
        whole = run.nbytes + run.since + need
        parts = 1
        while whole > had * parts and parts < batch:
            parts *= 2
        if 1 < parts <= batch and run.nbytes:
            words = (
                f"a batch of {batch // parts} instead of {batch} gets here with some {format_bytes(whole // parts)} instead of "
                f"{format_bytes(whole)}; what comes later may need more"
            )
            yield Fix(words=words, commands=(CLEANUP,), nbytes=whole - whole // parts, enough=None, loss=7)
            return
    depends = "; how much less depends on the model" if space.asked.kind in ("device", "library") else ""
    yield Fix(words=f"{words} asks for less{depends}", commands=(), nbytes=None, enough=None, loss=7)


def _keeps_its_learner(case: Case) -> bool:
    """Say whether the Learner that failed is one that a name keeps and that the run did not make itself."""
    graph, asked = case.space.facts.graph, case.space.asked
    roots = (n for n, root in enumerate(graph.roots) if root.kind not in STALE_KINDS and root.label not in asked.bound)
    return any(
        graph.nodes[node].ref == asked.learner and graph.nodes[node].kind in EXPERIMENT_KINDS
        for node in reach_of_roots(graph, roots)
    )
