"""A request that failed, the memory it could get now or if something were free, and predictions on its fit."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, replace

from nbguard.memory.core.advice import Advice, predict_savings, survive_around, survive_in_learner
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Facts, PoolId, Root
from nbguard.memory.core.oom_facts import HOST_KINDS, OomFact
from nbguard.memory.core.references.graph import STALE_KINDS, nbytes_of
from nbguard.memory.core.requests import (
    SMALL_MAX,
    Room,
    largest_request_in,
    largest_segment_within,
    returnable,
    rounded_to_blocks,
    segment_size,
    smallest_request_in,
)

# --- Predictions on a fit that ran out of memory: a batch that fits, and changes that save memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedChange:
    """A change to the fit that failed, predicted on the device after a cleanup."""

    name: str  # in words
    saved: int  # bytes fewer that are reserved at the peak
    fits: bool | None  # with it the fit runs; None if unknown
    cost: str  # cost of the change, in words
    code: str  # lines that make it, of the user's names

    @property
    def words(self) -> str:
        """Return its effect in a sentence without its first capital."""
        verdict = {True: "it fits (predicted)", False: "it does not fit either (predicted)", None: "it may fit"}[self.fits]
        return f"with {self.name}, {verdict}; {self.cost}"


def batch_that_fits(analysis: Analysis) -> int | None:  # noqa: ARG001 - a question
    """Return the batch size that lets the failed fit run after a cleanup, by prediction, or None if unknown.

    It takes a search, which the notebook makes: `Analysis.know` has its result.
    """
    return None


def predicted_changes(analysis: Analysis) -> tuple[PredictedChange, ...]:  # noqa: ARG001 - a question
    """Return the changes to the failed fit that were tried, those that fit first; the notebook knows them, as the batch."""
    return ()


def savings_of(request: FailedRequest) -> Advice | None:
    """Return the line that predicts the savings of memory in the failed fit, or None where it would say nothing.

    The fit is one of a Learner that a name leads to, and that trains.
    """
    oom = request.oom
    if oom.kind not in ("device", "library") or not oom.learner or not oom.trains:
        return None
    name = _name_of_learner(request)
    return predict_savings(name) if name else None


def survival_of(request: FailedRequest) -> Advice | None:
    """Return the line that lets the failed training go on in pieces, or None where it would be refused."""
    oom = request.oom
    if oom.kind not in ("device", "library") or not oom.guard:
        return None
    learner = _name_of_learner(request) if oom.learner else ""
    if oom.guard == "callback":
        return survive_in_learner("" if learner in oom.bound else learner)
    if oom.guard == "itself":
        return survive_around([learner or "trainer"])
    models, optimizers = _names_of(request, "model"), _names_of(request, "optimizer")
    model = models[0] if len(models) == 1 else "model"
    if oom.guard == "model":
        return survive_around([model])
    return survive_around([model, optimizers[0] if len(optimizers) == 1 else "optimizer"])


def _name_of_learner(request: FailedRequest) -> str:
    """Return the name of the Learner or Trainer that failed; empty if none leads to it."""
    graph = request.facts.graph
    for root in graph.roots:
        if name := _name_of(root):
            nodes = (graph.nodes[number] for number in root.nodes)
            if any(node.ref == request.oom.learner and node.kind in EXPERIMENT_KINDS for node in nodes):
                return name
    return ""


def _name_of(root: Root) -> str:
    """Return the name of a root that is a name or a function's variable; empty for any other."""
    name = root.label.rpartition("() → ")[2] if root.kind == "frame" else root.label
    return name if root.kind not in STALE_KINDS and name.isidentifier() else ""


def _names_of(request: FailedRequest, kind: str) -> list[str]:
    """Return the names of objects of a kind, one for each object."""
    graph = request.facts.graph
    found: dict[int, str] = {}
    for root in graph.roots:
        if (name := _name_of(root)) and not name.startswith("_"):
            found |= {number: name for number in root.nodes if graph.nodes[number].kind == kind and number not in found}
    return list(found.values())


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request for memory that failed, and the place where it was made."""

    analysis: Analysis
    oom: OomFact  # of the same facts
    device: DeviceAnalysis | None  # None for the host, and where the device is not known

    @classmethod
    def of(cls, analysis: Analysis, oom: OomFact) -> FailedRequest:
        """Return the request of `oom`; of several devices on the one that its text names."""
        return cls(analysis, oom, analysis.device_that_ran_out)

    @property
    def facts(self) -> Facts:
        """Return the facts of the scan after the failure."""
        return self.analysis.facts

    @property
    def name(self) -> str:
        """Return the name of the place: `cuda:0`, `cpu`."""
        return self.oom.device or "the device" if self.device is None else self.device.name

    @property
    def is_of_host(self) -> bool:
        """Say whether the host's memory was asked for."""
        return self.oom.kind in HOST_KINDS

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of the request, at most; None where the error does not say.

        PyTorch's errors tell the bytes of the segment that it asked the device for, rounded to hundredths of a unit.
        """
        if self._asked_for is None or self.is_of_host:
            return self._asked_for
        return largest_request_in(self._asked_for)

    @property
    def smallest(self) -> FailedRequest:
        """Return the smallest request with a segment of the same size, or itself where the size is not known.

        It was larger than each free block of its stream and pool.
        """
        segment = self._asked_for
        if segment is None or self.is_of_host or (least := smallest_request_in(segment)) == segment:
            return self
        too_small = self._too_small
        if (too_small > SMALL_MAX) is (least > SMALL_MAX) and too_small < segment:  # in the pool of the request
            least = max(least, rounded_to_blocks(too_small + 1))
        return replace(self, oom=replace(self.oom, requested=least, slack=0))

    @property
    def _too_small(self) -> int:
        """Return the bytes of the largest free block that did not serve the request; 0 where it may not have been asked.

        A request takes free blocks of its own stream and pool only, and none that a setting keeps for larger ones.
        """
        note, device = self.oom.note, self.device
        segments = () if device is None else device.facts.segments or ()
        if note is None or "max_split_size_mb" in note.settings or any(one.is_private or one.stream for one in segments):
            return 0
        return note.largest_free or 0

    @property
    def _asked_for(self) -> int | None:
        """Return the bytes that the error tells, at most: of the request on the host, on a device of the segment for it."""
        if self.oom.requested is None:
            return None
        most = self.oom.requested + self.oom.slack
        return largest_segment_within(most) if self.oom.slack and not self.is_of_host else most

    @property
    def nbytes_with_segment(self) -> int:
        """Return the bytes that new memory for the request takes of the device (0 where the error does not say)."""
        nbytes = self.nbytes or 0
        return segment_size(rounded_to_blocks(nbytes)) if nbytes and not self.is_of_host else nbytes

    @property
    def missing(self) -> int:
        """Return the bytes that the device had too few at the failure, at least; 0 where it was not seen."""
        note = self.oom.note
        if note is None:
            return 0
        free = note.free if note.limit is None else min(note.free, note.limit - note.reserved)
        return max(0, note.requested - free)

    @property
    def limit(self) -> int | None:
        """Return the bytes that torch may reserve on the device, if that is less than all of it."""
        if self.device is None:
            return None
        device = self.device.room.device
        return None if device.limit is None or (device.total is not None and device.limit >= device.total) else device.limit

    @property
    def releasable(self) -> int:
        """Return the bytes that `empty_cache` gives back there now; 0 where that is not known."""
        return 0 if self.device is None else self.device.room.releasable()

    def nbytes_here(self, storages: Collection[int]) -> int:
        """Return the bytes of those of `storages` that lie where the request was made."""
        graph = self.facts.graph
        return nbytes_of(graph, (n for n in storages if graph.storages[n].device == self.name))

    def largest(
        self,
        freed: Set[int] = frozenset(),
        in_use: Collection[PoolId] | None = None,
        *,
        is_emptied: bool = False,
        limited: bool = True,
    ) -> int | None:
        """Return the largest request that would succeed with the storages `freed` free; None where that is not known.

        `in_use` are the private pools that are kept then, `is_emptied` says that the cache is emptied first, as every cleanup
        does; the memory fraction counts if `limited`.
        """
        if self.is_of_host:
            room = None if self.oom.host is None else self.oom.host.room
            return None if room is None else room + self.nbytes_here(freed)
        device = self._room(freed, in_use, is_emptied=is_emptied, limited=limited)
        if device is None:
            return None
        if self.oom.kind == "library":  # it asks the driver, which has no free blocks and knows no memory fraction
            kept = self.analysis.pools_in_use if in_use is None else in_use
            return (device.device.free or 0) + returnable(self.facts, device.device, freed, kept)
        return device.largest().flushed

    def largest_now(self) -> int | None:
        """Return the largest request that would succeed as things are; for CUDA's libraries torch empties no cache."""
        return self.device.facts.free if self.oom.kind == "library" and self.device is not None else self.largest()

    def would_succeed(
        self,
        freed: Set[int] = frozenset(),
        in_use: Collection[PoolId] | None = None,
        *,
        is_emptied: bool = False,
        taken: int = 0,
        limited: bool = True,
        more: int = 0,
        is_new: bool = False,
        is_pinned: bool = False,
    ) -> bool | None:
        """Say whether the request would succeed with the storages `freed` free; None where that is not known.

        `taken` bytes are allocated before it (`is_pinned`: perhaps in free segments, which then stay), `more` bytes are free on
        the device besides, `is_new` says that no free block serves it; the rest as in `largest`.
        """
        nbytes = self.nbytes
        if nbytes is None or self.oom.kind == "library":
            return None
        if self.is_of_host:
            room = self.largest(freed)
            return None if room is None else room >= nbytes + taken
        device = self._room(freed, in_use, is_emptied=is_emptied, limited=limited)
        if device is None:
            return None
        enlarged = replace(device.device, free=(device.device.free or 0) + more)
        return replace(device, device=enlarged, taken=taken, is_pinned=is_pinned).fits_on_any_stream(nbytes, is_new=is_new)

    def _room(self, freed: Set[int], in_use: Collection[PoolId] | None, *, is_emptied: bool, limited: bool) -> Room | None:
        """Return the room on the device with the storages `freed` free; None where its free memory is not known."""
        device = self.device
        if device is None or device.facts.free is None or device.facts.segments is None:
            return None
        storages = (self.facts.graph.storages[number] for number in freed)
        return replace(
            device.room,
            device=device.room.device if limited else replace(device.room.device, limit=None),
            freed={storage.address for storage in storages if storage.device == device.name},
            in_use=device.room.in_use if in_use is None else in_use,
            is_emptied=is_emptied,
        )
