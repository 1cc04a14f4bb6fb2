"""The card after an out-of-memory error: what was asked for, what there was and is, who holds it, and what lets it through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.cleanup.plan.plan import Plan, Request
from nbguard.cleanup.plan.planner import plan_cleanup
from nbguard.memory.breakdown import Part, parts_of
from nbguard.memory.facts import DeviceFacts, Facts
from nbguard.memory.finding import Finding
from nbguard.memory.fragmentation import fragmentation
from nbguard.memory.graph import Holder
from nbguard.memory.oom_facts import HOST_KINDS, HostFacts, OomFact
from nbguard.memory.pools import pools_in_use
from nbguard.memory.unheld import all_holders
from nbguard.out_of_memory.fixes import Case, Fix, fixes
from nbguard.out_of_memory.need import FailedRun, Space
from nbguard.render.result import Result
from nbguard.units import format_bytes

_HOLDERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCard(Result):
    """What `%gpumem oom` says. Frozen numbers and words: keeping one keeps nothing else alive. All sizes are bytes.

    `asked` is what the error and the observer tell. `parts` are those of the device now (they re-add to its size), or of the
    host; `limit` what torch may reserve, if that is less; `largest_free` the largest block that is free in torch's cache;
    `had` the largest request that would succeed now (None: not known). `taken` is what the failed run still holds itself.
    `holders` are the largest of `held` bytes in all, `notes` what is to be known of the figures.
    """

    kind: ClassVar[str] = "oomcard"
    view: ClassVar[str] = "nbguard.out_of_memory.card_view:oom_blocks"

    asked: OomFact
    device: str
    parts: tuple[Part, ...]
    limit: int | None
    largest_free: int | None
    had: int | None
    taken: int
    holders: tuple[Holder, ...]
    held: int
    fixes: tuple[Fix, ...]
    notes: tuple[str, ...]


def build_card(facts: Facts, plan: Plan | None = None) -> OomCard | None:
    """Return the card on the last error, or None if it did not run out of memory; `plan` is the default cleanup."""
    asked = facts.oom
    if asked is None:
        return None
    plan = plan_cleanup(facts, Request()) if plan is None else plan
    space = Space.of(facts, asked)
    run = FailedRun.of(space, plan)
    device = _tracked(facts, space)
    rows = () if device is None else all_holders(facts.graph, device, plan.storages)
    held = sum(row.retained for row in rows)
    parts = _host_parts(asked) if asked.kind in HOST_KINDS else () if device is None else _parts(facts, device, held)
    segments = None if space.device is None else space.device.segments
    found = fragmentation(segment for segment in segments if not segment.is_private) if segments is not None else None
    return OomCard(
        asked=asked,
        device=space.name,
        parts=parts,
        limit=space.limit,
        largest_free=None if found is None else found.largest_free,
        had=space.now(),
        taken=run.nbytes,
        holders=tuple(row for row in rows if row.retained)[:_HOLDERS],
        held=held,
        fixes=fixes(Case(space=space, run=run, plan=plan, rows=rows, parts=parts)),
        notes=tuple(_notes(facts, asked, space)),
    )


def out_of_memory(facts: Facts, plan: Plan) -> Iterator[Finding]:
    """Say of the last error what it asked for and what is best done about it: the card in one sentence."""
    card = build_card(facts, plan)
    if card is None:
        return
    words = f"the last error ran out of memory: {asked_words(card.asked, card.device)}"
    best = card.fixes[0]
    code = ", then ".join(f"`{command}`" for command in best.commands)
    what = f"{code} {best.words}" if code else best.words
    yield Finding("oom", f"{words}; {what} (`%gpumem oom` says more)", "%gpumem oom")


def asked_words(asked: OomFact, device: str) -> str:
    """Return what was asked for: `it asked cuda:0 for 400.00 MiB`."""
    match asked.kind:
        case "worker":
            return "a DataLoader worker was killed, as the system does to what uses too much host memory"
        case "shm":
            return "shared memory, through which DataLoader workers hand over batches, was full"
    who = "a library of CUDA's" if asked.kind == "library" else "it"
    where = "the host" if asked.kind in HOST_KINDS else device
    if asked.requested is None:
        return f"{who} asked {where} for memory, and does not say how much"
    return f"{who} asked {where} for {'about ' if asked.slack else ''}{format_bytes(asked.requested)}"


def _tracked(facts: Facts, space: Space) -> DeviceFacts | None:
    """Return the device whose holders are known: the one that ran out, or the host where CPU tensors are tracked."""
    if space.device is not None:
        return space.device
    return next((device for device in facts.devices if device.device == space.name), None)


def _parts(facts: Facts, device: DeviceFacts, held: int) -> tuple[Part, ...]:
    return parts_of(device, held, facts.pid, pools_in_use(facts))


def _host_parts(asked: OomFact) -> tuple[Part, ...]:
    """Return what the host has, as far as it is known: no parts of a whole, each is a bound of its own."""
    host = HostFacts() if asked.host is None else asked.host
    found = [("memory of the machine", host.total, ""), ("available", host.available, "without swapping")]
    if host.group_limit is not None:
        found += [("limit of the container", host.group_limit, "cgroup"), ("left in the container", host.group_room, "")]
    if host.address_limit is not None:
        found += [("address space allowed", host.address_limit, "ulimit -v"), ("left of it", host.address_room, "")]
    if asked.kind != "host" and host.shm_total is not None:
        found += [("shared memory", host.shm_total, "docker run --shm-size sets it"), ("free in it", host.shm_free, "")]
    return tuple(Part(name, nbytes, note) for name, nbytes, note in found if nbytes is not None)


def _notes(facts: Facts, asked: OomFact, space: Space) -> Iterator[str]:
    """Yield what must be known to read the figures."""
    if asked.slack:
        yield f"the request is as the error's text rounds it: up to {format_bytes(asked.slack)} more"
    if asked.kind == "device" and asked.requested is not None and asked.requested <= 20 * 1024**2:
        yield "PyTorch asks for 2 MiB or 20 MiB at least, however small the tensor"
    if asked.note is not None and asked.note.unread:
        yield asked.note.unread
    if asked.kind in HOST_KINDS and facts.tracked != "cpu":
        yield f"what holds the host's memory is not listed: the tensors of {facts.tracked} are tracked"
    machine = None if asked.host is None else asked.host.total
    if asked.kind == "host" and asked.requested is not None and machine is not None and asked.requested > machine:
        yield "the request is larger than the whole machine's memory: no cleanup makes room for it"
    if asked.kind not in HOST_KINDS and space.device is None:
        yield "the error does not say which of the devices it was"
