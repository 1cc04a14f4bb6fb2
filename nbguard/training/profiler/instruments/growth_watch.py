"""Watches whether memory grows from batch to batch, and if so looks twice for its holder; after the fit, for kept graphs."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.graphs import Graphs, sequence_of
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.roots.frames import frame_locals, running_frames
from nbguard.training.profiler.analysis.growth_holders import (
    NODE,
    TENSOR,
    Grown,
    HolderSizes,
    explains,
    grown,
    holder_sizes,
    keepers,
)
from nbguard.training.profiler.analysis.memory_growth import ENOUGH, WARM_UP, KeptGraphs, Sample, growth_per_batch
from nbguard.training.profiler.record.recorder import Recorder

_MOST_NODES = 3000
"""Most nodes of graphs that a scan goes into; a model of some hundred layers has that many in a batch."""


def living_nbytes() -> int | None:
    """Return the most bytes of tensors, their graphs and saved tensors, or None if they are too many to go through."""
    autograd, kinds = Autograd(), Kinds()
    tensors = kinds.tracked({"tensor"})
    graphs = Graphs(autograd, kinds, _MOST_NODES)
    nodes: dict[int, Any] = {}

    def link(_: Any, node: Any) -> None:
        nodes[id(node)] = node

    for tensor in filter(autograd.has_graph, tensors):
        root = graphs.root_of(tensor)
        if root is not None:
            nodes[id(root)] = root
            graphs.walk(root, link, _ignore)
    if graphs.cut:
        return None
    saved = (value for node in nodes.values() for value in autograd.graph_referents(node))
    tensors += [value for value in saved if kinds.of(type(value)) == "tensor"]
    return len(nodes) * NODE + len(tensors) * TENSOR + _nbytes(autograd, tensors)


def _nbytes(autograd: Autograd, tensors: Iterable[Any]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = autograd.storage(tensor)
            sizes[storage._cdata] = storage.nbytes()
        except (RuntimeError, AttributeError):  # sparse and wrapper tensors have no storage of their own
            continue
    return sum(sizes.values())


def _ignore(_: Any) -> None:
    """Do nothing: nodes left out are counted in `Graphs.cut`."""


_APART = 8
"""Training batches between the two looks."""
_SOON = 2
"""Samples between two short scans."""
_KEPT = 4
"""Backward passes in a row that leave their graph alive. Then tensors may grow, batches with them become slower and slower, and
nobody waits until memory was watched for long, so short scans begin at once. As many training batches lie between the two
whole scans."""
_TOO_SLOW = 3.0
_LONG = 60.0
"""Seconds. There is no second scan after one that took the processor too long, unless the fit is a long one."""
_MOST_SAMPLES = 2048


class GrowthWatch:
    """Keeps samples of allocated memory after training batches. Holds no object of the user's."""

    watches = "holders of growing memory"

    def __init__(self, recorder: Recorder, read: Callable[[], int], tracked: str) -> None:
        """`read` returns the bytes allocated on the device of the fit, which is of the kind `tracked`."""
        self.looks: int = 0
        self._tracked = tracked
        self._recorder = recorder
        self._read = read
        self._samples: list[Sample] = []
        self._seen = 0
        self._asked_at = WARM_UP + ENOUGH
        self._has_asked = False
        self._living: tuple[int, int] | None = None  # batch and bytes of the first of two short scans
        self._left_by_us = 0  # bytes that our looks, short or not, left allocated
        self._first: HolderSizes | None = None
        self._looked_at = 0
        self._seconds = 0.0
        self._grown: Grown | None = None

    def sample(self, batch: int, epoch: int, allocated: int) -> None:
        """Note the bytes allocated at the boundary after training batch `batch`; look if it has grown all the time."""
        self._samples.append(Sample(batch, epoch, allocated - self._left_by_us))
        self._seen += 1
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[WARM_UP::2]
        if self._first is None:
            is_due = self._seen >= self._asked_at or (self._keeps_graphs() and not self._has_asked)
            if is_due and self._may_be_tensors(batch):
                with self._accounted():
                    self._first, self._looked_at = self._held(), batch
        elif batch >= self._looked_at + (_KEPT if self._keeps_graphs() else _APART):
            self._look_again(batch)

    def _keeps_graphs(self) -> bool:
        return self._recorder.kept >= _KEPT

    def _rate(self) -> int | None:
        """Return the bytes of growth per batch; where all graphs are kept, at least one node of theirs."""
        per_batch = growth_per_batch(self._samples)
        return NODE if per_batch is None and self._keeps_graphs() else per_batch

    def _may_be_tensors(self, batch: int) -> bool:
        """Say whether memory grows and tensors are enough to explain it, by two short scans; else note when to ask again.

        The heap of a process grows by much else, such as plots.
        """
        before, self._living, self._has_asked = self._living, None, True
        per_batch = self._rate()
        if per_batch is not None:
            with self._accounted():
                nbytes = living_nbytes()
            if nbytes is None or (before is not None and explains(nbytes - before[1], per_batch * (batch - before[0]))):
                return True
            if before is None:
                self._living = batch, nbytes
                self._asked_at = self._seen + _SOON
                return False
        self._asked_at += -(-self._asked_at // 2)
        return False

    def _look_again(self, batch: int) -> None:
        """Find the holder that has grown since the first scan."""
        if self._first is not None and self._grown is None and batch > self._looked_at and self._may_scan():
            batches = batch - self._looked_at
            with self._accounted():
                found = grown(self._first, self._held(), (self._rate() or 0) * batches)
                self._grown = None if found is None else replace(found, batches=batches, is_retained=self._keeps_graphs())

    def end(self, _: object = None) -> None:
        """Scan a last time, if the fit ends soon after the first scan."""
        if self._samples:
            self._look_again(self._samples[-1].batch)

    def _may_scan(self) -> bool:
        return self.looks < 2 and (self._seconds < _TOO_SLOW or self._recorder.elapsed > _LONG * 1e9)

    def _held(self) -> HolderSizes:
        """Look at the process once, from within the fit: variables of functions are there only now."""
        from nbguard.memory.scan.scan import Notebook, scan  # few fits are looked at: the others do without its modules

        self.looks += 1
        self._recorder.boundary("disturbed")
        start = time.thread_time()
        sizes = holder_sizes(scan(Notebook.current(), tracked=self._tracked).facts.graph, _variables())
        self._seconds = time.thread_time() - start
        return sizes

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Count the bytes that a scan leaves allocated after its temporaries are gone."""
        before = self._read()
        yield
        self._left_by_us += self._read() - before

    def observe(self) -> tuple[tuple[Sample, ...], Grown | None]:
        """Return the samples, and the holder that grew between the two looks."""
        return tuple(self._samples), self._grown


def _variables() -> dict[int, str]:
    """Return the names of running functions' variables, by the objects' ids; the outermost function's name wins."""
    names: dict[int, str] = {}
    for _, frame in running_frames():
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            names.update((id(value), name) for name, value in frame_locals(frame).items())
    return names


def operations_so_far() -> int:
    """Return the operations that autograd has recorded on this thread so far; 0 where torch does not say."""
    count = getattr(sys.modules["torch"].autograd, "_get_sequence_nr", None)
    return 0 if count is None else int(count())


def kept_graphs(since: int = 0, least: int = ENOUGH, tracked: str = "") -> tuple[KeptGraphs, ...]:
    """Return the names that hold many tensors with graphs of their own, the most first, however few their bytes.

    `tracked`: the kind of their device; if empty, the one that nbguard reports on.
    `since`: `operations_so_far()` when the fit began. Tensors that were computed before it are left out. Where fewer than
    `least` are left, nobody holds that many, and the process is not scanned.
    """
    older, since_then = _with_graphs(since)
    if since_then < least:
        return ()
    from nbguard.memory.scan.scan import Notebook, scan

    graph = scan(Notebook.current(), tracked=tracked).facts.graph
    roots = tuple(root for root in graph.roots if root.kind == "name")
    sizes = holder_sizes(replace(graph, roots=roots), {}, older)
    return tuple(KeptGraphs(*holder) for holder in keepers(sizes, least))


def _with_graphs(since: int) -> tuple[frozenset[int], int]:
    """Return the ids of the tensors with a graph that were computed before so many operations, and the number of the others."""
    autograd = Autograd()
    with_graph = [tensor for tensor in Kinds().tracked({"tensor"}) if autograd.has_graph(tensor)]
    older = frozenset(id(tensor) for tensor in with_graph if sequence_of(autograd.grad_fn(tensor)) < since)
    return older, len(with_graph) - len(older)
