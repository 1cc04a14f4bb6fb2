"""What a request that failed could get: now, and if something were free. And what the run that made it had taken itself."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from nbguard.cleanup.plan.plan import Plan, Request
from nbguard.cleanup.plan.planner import plan_cleanup
from nbguard.memory.facts import DeviceFacts, Facts, PoolId, Root
from nbguard.memory.fragmentation import EXPANDABLE_PAGE, by_pool
from nbguard.memory.graph import nbytes_of, reach_of_roots, storages_of
from nbguard.memory.oom_facts import HOST_KINDS, OomFact
from nbguard.memory.pools import pools_in_use, returnable

_SMALL = 2 * 1024**2
"""The segment that PyTorch asks for when a request is of the small pool, up to 1 MiB."""
_LAST_ERROR = "last error"


@dataclass(frozen=True, slots=True)
class Space:
    """Where the request was made. `device` is None for the host and where the device is not known."""

    facts: Facts
    asked: OomFact
    device: DeviceFacts | None

    @classmethod
    def of(cls, facts: Facts, asked: OomFact) -> Space:
        """Return the space that `asked` ran out of; of several devices the one that its text names."""
        if asked.kind in HOST_KINDS:
            return cls(facts, asked, None)
        found = [device for device in facts.devices if asked.device in (device.device, "", device.device.partition(":")[0])]
        return cls(facts, asked, found[0] if len(found) == 1 else None)

    @property
    def name(self) -> str:
        """Return what it is called: `cuda:0`, `cpu`."""
        return self.asked.device or "the device" if self.device is None else self.device.device

    @property
    def is_expandable(self) -> bool:
        """Return whether the allocator's segments grow."""
        if self.device is None:
            return False
        return any(s.is_expandable for s in self.device.segments or ()) or "expandable_segments:True" in self.device.settings

    @property
    def need(self) -> int | None:
        """Return the bytes that must be free for the request, at most; an expandable segment grows by whole pages."""
        if self.asked.requested is None:
            return None
        need = self.asked.requested + self.asked.slack
        page = EXPANDABLE_PAGE["large"] if self.is_expandable and need > _SMALL else 1
        return -(-need // page) * page

    @property
    def limit(self) -> int | None:
        """Return what torch may reserve on the device, if that is less than all of it."""
        if self.device is None:
            return None
        limit = self.asked.limit if self.device.limit is None else self.device.limit
        total = self.device.total
        return None if limit is None or (total is not None and limit >= total) else limit

    def on_it(self, storages: Collection[int]) -> int:
        """Return the bytes of those of `storages` that lie here."""
        graph = self.facts.graph
        return nbytes_of(graph, (n for n in storages if graph.storages[n].device == self.name))

    def had(
        self, freed: Set[int] = frozenset(), in_use: Collection[PoolId] | None = None, *, limited: bool = True
    ) -> int | None:
        """Return the largest request that would succeed with the storages `freed` free; None where that is not known.

        Either a free block is large enough, or the driver hands out a new segment after torch has emptied its cache, within
        the memory fraction (if `limited`). `in_use` are the private pools that are kept.
        """
        if self.asked.kind in HOST_KINDS:
            room = None if self.asked.host is None else self.asked.host.room
            return None if room is None else room + self.on_it(freed)
        device = self.device
        if device is None or device.free is None or device.segments is None:
            return None
        back = returnable(self.facts, device, freed, pools_in_use(self.facts) if in_use is None else in_use)
        new = device.free + back
        if limited and self.limit is not None:
            reserved = sum(segment.total_size for segment in device.segments)
            new = min(new, self.limit - reserved + back)
        return max(new, self._hole(device, freed))

    def now(self) -> int | None:
        """Return the largest request that would succeed as things are; for CUDA's libraries torch empties no cache."""
        return self.device.free if self.asked.kind == "library" and self.device is not None else self.had()

    def _hole(self, device: DeviceFacts, freed: Set[int]) -> int:
        """Return the largest free block that the request could have; 0 where several streams have blocks of their own."""
        addresses = {
            storage.address
            for storage in (self.facts.graph.storages[number] for number in freed)
            if storage.device == device.device
        }
        small = self.need is not None and self.need <= _SMALL
        pools = by_pool([s for s in device.segments or () if not s.is_private and s.is_small == small], addresses)
        return max((space.largest_free for space in pools.values()), default=0) if len(pools) == 1 else 0


@dataclass(frozen=True, slots=True)
class FailedRun:
    """What the run that failed had taken when it asked: it will take that again.

    `own` are the storages that its frames and the names it had bound still hold, `since` the bytes that went between the
    failure and now; None if nobody knows.
    """

    own: frozenset[int]
    nbytes: int
    since: int | None

    @classmethod
    def of(cls, space: Space, plan: Plan) -> FailedRun:
        """Return what the run had taken; `plan` is the default cleanup, which frees what only the error holds."""
        facts, asked = space.facts, space.asked
        without = plan_cleanup(_without_learners(facts), Request(keep=(_LAST_ERROR,)))
        own = (plan.storages - without.storages) | _bound_by_the_run(facts, asked)
        since = None if asked.was_released else 0
        device = space.device
        if asked.note is not None and device is not None and device.allocator is not None:
            since = max(0, asked.note.allocated + asked.note.slack - device.allocator.allocated)
        return cls(own, space.on_it(own), since)

    def passes(self, space: Space, freed: Set[int], in_use: Collection[PoolId] | None = None) -> bool | None:
        """Say whether the same run would have got what it asked for, had `freed` been free then; None: not known.

        What it had taken itself counts as taken.
        """
        return self.covers(space.need, space.had(frozenset(freed) - self.own, in_use))

    def covers(self, need: int | None, had: int | None) -> bool | None:
        """Say whether `had` bytes are enough for a need of the same run; None: not known."""
        if need is None or had is None:
            return None
        if had < need:
            return False
        return True if self.since is not None and had >= need + self.since else None


def _without_learners(facts: Facts) -> Facts:
    """Return facts by which a plan clears no Learner's leftovers."""
    return Facts(tracked=facts.tracked, devices=facts.devices, graph=facts.graph, pools=facts.pools)


def _bound_by_the_run(facts: Facts, asked: OomFact) -> set[int]:
    """Return the storages that only names which the failed run has bound, and its error, hold."""
    graph = facts.graph

    def is_its_own(root: Root) -> bool:
        return root.kind == "name" and root.label in asked.bound

    own = {number for number, root in enumerate(graph.roots) if is_its_own(root)}
    others = (n for n, root in enumerate(graph.roots) if n not in own and root.kind != "error")
    return storages_of(graph, reach_of_roots(graph, own)) - storages_of(graph, reach_of_roots(graph, others)) if own else set()
