"""The analysis of one scan, that is, the conclusions from its facts, each computed when it is first asked for, and once.

All readers of the same facts get the same analysis: the report, its findings, the map, the card after an
out-of-memory error, the sidebar. So no two of them can give two answers to one question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

from nbguard.memory.core.facts import DeviceFacts, Facts, Graph, PoolId
from nbguard.memory.core.oom_facts import device_that_ran_out
from nbguard.memory.core.references.holders import Holding, holdings
from nbguard.memory.core.references.owner_sets import owners_of_nodes, owners_of_storages
from nbguard.memory.core.segments.fragmentation import Fragmentation, fragmentation
from nbguard.memory.core.segments.pinning import Unit, units
from nbguard.memory.core.segments.pools import Pool, pools_in_use, pools_of
from nbguard.memory.core.segments.requests import LargestRequest, RequestLimits, Room

Answer = TypeVar("Answer")


class _Answers:
    """Answers to questions of rooms above this one, each asked once."""

    def __init__(self, answers: Mapping[Callable[[Any], object], object] | None = None) -> None:
        self._answers = dict(answers or {})

    def _answer(self, question: Callable[[Any], Answer]) -> Answer:
        if question not in self._answers:
            self._answers[question] = question(self)
        return cast("Answer", self._answers[question])


class Analysis(_Answers):
    """The facts of one scan, and the answers computed from them. Not for several threads at a time."""

    def __init__(self, facts: Facts, answers: Mapping[Callable[[Any], object], object] | None = None) -> None:
        super().__init__(answers)
        self.facts = facts

    def once(self, question: Callable[[Analysis], Answer]) -> Answer:
        """Return the answer of the function `question` on this analysis, computed at the first call and then remembered."""
        return self._answer(question)

    def know(self, question: Callable[[Analysis], object], answer: object) -> None:
        """Have `once` return this answer to a question that the facts alone do not decide, from now on."""
        self._answers[question] = answer

    def with_graph(self, graph: Graph, *keep: Callable[[Analysis], object]) -> Analysis:
        """Return an analysis of the same facts by another graph, with the same answers to `keep`."""
        return Analysis(replace(self.facts, graph=graph), {question: self.once(question) for question in keep})

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """Return the holders among Python's objects on all devices together, each with its storages."""
        return holdings(self.facts.graph)

    @cached_property
    def node_owners(self) -> list[int]:
        """Return the roots that lead to each node, as the bits of a number."""
        return owners_of_nodes(self.facts.graph, [root.nodes for root in self.facts.graph.roots])

    @cached_property
    def storage_owners(self) -> list[int]:
        """Return the roots that lead to each storage, as the bits of a number."""
        return owners_of_storages(self.facts.graph, self.node_owners)

    @cached_property
    def pools_in_use(self) -> frozenset[PoolId]:
        """Return the private pools of the allocator that a CUDA graph or a MemPool keeps in use."""
        return pools_in_use(self.facts)

    @cached_property
    def devices(self) -> tuple[DeviceAnalysis, ...]:
        """Return the analysis of each device, in the order of the facts."""
        return tuple(DeviceAnalysis(self, device) for device in self.facts.devices)

    @cached_property
    def device_that_ran_out(self) -> DeviceAnalysis | None:
        """Return the device that the last error ran out of; None for the host, and where it is not known which it was."""
        failed = None if self.facts.oom is None else device_that_ran_out(self.facts.oom, [d.name for d in self.devices])
        return next((device for device in self.devices if device.name == failed), None)


class DeviceAnalysis(_Answers):
    """One device of an analysis."""

    def __init__(self, analysis: Analysis, facts: DeviceFacts) -> None:
        super().__init__()
        self.analysis, self.facts = analysis, facts

    def once(self, question: Callable[[DeviceAnalysis], Answer]) -> Answer:
        """Return the answer of the function `question` on this device, computed at the first call and then remembered."""
        return self._answer(question)

    @property
    def name(self) -> str:
        """Return the device's name in torch: `cuda:0`."""
        return self.facts.device

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """Return the holders among Python's objects of bytes on this device, each with its storages here."""
        graph = self.analysis.facts.graph
        is_alone = all(storage.device == self.name for storage in graph.storages)
        return self.analysis.holdings if is_alone else holdings(graph, self.name)

    @cached_property
    def space(self) -> Fragmentation:
        """Return the fragmentation of all segments; all figures are 0 where the segments are not known."""
        return fragmentation(self.facts.segments or (), in_use=self.analysis.pools_in_use)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Return the allocator's pools by name; none where its segments are not known."""
        return pools_of(self.analysis.facts, self.facts)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return the segments, and the stretches of pages, that have live blocks: each goes back to the device as one."""
        return tuple(units(self.facts.segments or (), self.analysis.pools_in_use))

    @cached_property
    def room(self) -> Room:
        """Return the room for requests of the default stream. Where torch does not tell its limit, the last error may."""
        oom, device = self.analysis.facts.oom, self.facts
        if device.limit is None and oom is not None and self is self.analysis.device_that_ran_out:
            device = replace(device, limit=oom.limit)
        return Room(device=device, in_use=self.analysis.pools_in_use)

    @cached_property
    def limits(self) -> RequestLimits:
        """Return the limits of the largest request, apart from the device's free memory."""
        return self.room.limits()

    @cached_property
    def largest(self) -> LargestRequest:
        """Return the largest request that would succeed now, and the largest free block."""
        return self.limits.largest(self.facts.free)
