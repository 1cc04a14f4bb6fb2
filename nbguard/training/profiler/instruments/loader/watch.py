"""Watches a fit's loaders, with their settings, the cost of their fetches and the function that costs most."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from threading import get_ident
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.learners import worker_count
from nbguard.training.profiler.analysis.loader.slowest import LoaderFacts
from nbguard.training.profiler.instruments.loader.fetching import FetchSamples, FetchTimer, facts_of, together
from nbguard.training.profiler.instruments.loader.loader_facts import facts_of_iterator, shown
from nbguard.training.profiler.instruments.loader.workers import TimedLoop, WorkerBoard
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder

Function = Callable[..., Any]

_LOADERS = 32  # that are watched; a fit that makes more makes the same one again
_BOARDS = 8  # of one loader that are listened to: later ones make the earliest a figure


class _Watched:
    """The observations of one loader so far. The loader itself is held weakly."""

    def __init__(self, ref: weakref.ref[Any] | None) -> None:
        self.ref = ref
        self.facts = LoaderFacts(dataset="")
        self.timer = FetchTimer()
        self.boards: list[WorkerBoard] = []
        self.past = FetchSamples()
        self.iterators = 0
        self.starts: list[int] = []
        self.note = ""
        self.copied = 0  # bytes, by all workers of an iterator that is no longer listened to

    def part(self) -> FetchSamples:
        """Return the samples of its fetches."""
        return together([self.past, self.timer.part(), *(part for board in self.boards for part in board.read())])

    def facts_of_use(self) -> LoaderFacts:
        """Return all that is known of it."""
        fetch = facts_of(self.part())
        note = self.note or fetch.note
        if not note and not fetch.steps:
            note = "not known: no fetch was profiled; it takes two of the same process"
        fetch = replace(fetch, steps=tuple(map(shown, fetch.steps)), note=note)
        start = round(median(self.starts)) if self.starts else None
        copied = max([self.copied, *(_copied(board.read()) for board in self.boards)])
        return replace(self.facts, iterators=self.iterators, start=start, fetch=fetch, copied=copied)

    def new_board(self, workers: int) -> WorkerBoard:
        """Return the board of the workers that are about to start."""
        board = WorkerBoard(workers, self.part())
        self.boards.append(board)
        if len(self.boards) > _BOARDS:
            oldest = self.boards.pop(0)
            oldest.close()
            samples = [*oldest.read()]
            self.past = together([self.past, *samples])
            self.copied = max(self.copied, _copied(samples))
        return board


def _copied(samples: Iterable[FetchSamples]) -> int:
    """Return the bytes that the workers of one iterator have copied together."""
    return sum(part.copied for part in samples)


class LoaderWatch:
    """Watches every loader that a fit asks for batches, and their workers, as far as these are started meanwhile."""

    watches = "fetches of loaders"

    def __init__(self) -> None:
        self._patches = Patches()
        self._fetches = Patches()
        self._starts = Patches()  # while workers start
        self._pid = os.getpid()
        self._watched: list[_Watched] = []
        self._iterators: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._counters: weakref.WeakKeyDictionary[Any, FetchTimer] = weakref.WeakKeyDictionary()
        self._current: tuple[Callable[[], Any], FetchTimer | None] = (lambda: None), None  # a fetcher, which is asked often
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handed: _Watched | None = None  # is watched on by another watch
        self._awaited: tuple[_Watched, int] | None = None  # waits for its first batch
        self._fresh: _Watched | None = (
            None  # whose purpose is not known yet: some loops ask for several batches before they train
        )

    def start(self, recorder: Recorder) -> None:
        """Put the clocks around fetches."""
        from torch.utils.data import dataloader

        self._recorder = recorder
        self._patches.put(dataloader._BaseDataLoaderIter, "__init__", self._init)
        self._patches.put(dataloader._MultiProcessingDataLoaderIter, "__init__", self._init_with_workers)
        self._time_fetches()
        recorder.subscribe("loader", self._loader)
        recorder.subscribe("stretch", self._turn)

    def stop(self) -> None:
        """Take the clocks away; workers that go on take theirs away themselves."""
        self._fetches.restore()
        self._patches.restore()
        for watched in self._watched:
            if watched is not self._handed:
                for board in watched.boards:
                    board.close()

    def loader_of(self, iterator: Any) -> Any:
        """Return the loader that an iterator is over; None where that is not known, or gone."""
        watched = self._iterators.get(iterator)
        return None if watched is None or watched.ref is None else watched.ref()

    def hand_over(self, iterator: Any) -> _Watched | None:
        """Return the observations of an iterator's loader so far. Another watch goes on with them: its workers are heard on."""
        handed = self._handed = self._iterators.get(iterator)
        if handed is not None and handed.iterators == 1:  # it was asked by nobody else
            self._watched.remove(handed)
        return handed

    def take_over(self, iterator: Any, watched: _Watched) -> None:
        """Go on with the observations of an iterator's loader."""
        self._iterators[iterator] = self._add(watched)

    def observe(self) -> tuple[LoaderFacts, ...]:
        """Return the loaders that were asked for batches."""
        return tuple(watched.facts_of_use() for watched in self._watched if watched.iterators)

    def loader(self) -> Any | None:
        """Return the loader of the training batches itself: torch's or a Learner's; None if it is gone, or there was none."""
        training = [watched for watched in self._watched if watched.facts.is_training and watched.ref is not None]
        busiest = max(training, key=lambda watched: watched.part().fetches, default=None)
        loader = busiest.ref() if busiest is not None and busiest.ref is not None else None
        is_learners = busiest is not None and busiest.facts.is_learners
        return attribute_of(loader, "d") if is_learners else loader

    # --- on the thread of the fit, as iterators begin ---------------------------------------------------------------------

    def _init(self, original: Function) -> Function:
        recorder = self._recorder

        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807 - it stands in for it
            __tracebackhide__ = True
            if get_ident() == recorder.thread and os.getpid() == self._pid:
                recorder.attempt(self, "the start of an iterator", self._begins, iterator, loader)
            original(iterator, loader)

        return __init__

    def _init_with_workers(self, original: Function) -> Function:
        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807 - it calls the other one, and starts workers then
            __tracebackhide__ = True
            try:
                original(iterator, loader)
            finally:
                self._starts.restore()

        return __init__

    def _time_fetches(self) -> None:
        """Put clocks around the fetches of this process."""
        from torch.utils.data._utils import fetch

        self._fetches.restore()
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._fetches.put(fetcher, "fetch", self._fetch)

    def _turn(self, begins: bool) -> None:
        """Time fetches while all batches are sampled, which tells the cost of a fetch."""
        if begins:
            self._time_fetches()
        else:
            self._fetches.restore()

    def _begins(self, iterator: Any, loader: Any) -> None:
        watched = self._of(loader)
        self._iterators[iterator] = watched
        self._begun[iterator] = self._recorder.clock()
        workers = worker_count(loader)
        if workers:
            from torch.utils.data._utils import worker

            board = watched.new_board(workers)
            self._starts.put(worker, "_worker_loop", lambda loop: TimedLoop(loop, board, self._fetches))

    def _of(self, loader: Any) -> _Watched:
        for watched in self._watched:
            if watched.ref is not None and watched.ref() is loader:
                return watched
        return self._add(_Watched(weakref.ref(loader)))

    def _add(self, watched: _Watched) -> _Watched:
        if len(self._watched) < _LOADERS:
            self._watched.append(watched)
        return watched

    def _loader(self, iterator: Any) -> None:
        watched = self._iterators.get(iterator)
        if watched is None:
            watched = self._add(_Watched(None))
            if worker_count(iterator):
                watched.note = "not known: the workers were started before the profile"
        watched.iterators += 1
        loader = watched.ref() if watched.ref is not None else None
        watched.facts = replace(facts_of_iterator(iterator, loader), is_training=watched.facts.is_training)
        fetcher = attribute_of(iterator, "_dataset_fetcher")
        if fetcher is not None:
            self._counters[fetcher] = watched.timer
            self._current = weakref.ref(fetcher), watched.timer
        self._fresh = watched
        self._recorder.subscribe("end", self._settle)
        self._recorder.subscribe("backward", self._backward)
        begun = self._begun.get(iterator)
        if begun is not None:
            self._awaited = watched, begun
            self._recorder.subscribe("waited", self._waited)

    def _waited(self) -> None:
        if self._awaited is not None:
            watched, begun = self._awaited
            watched.starts.append(self._recorder.clock() - begun)
        self._awaited = None
        self._recorder.unsubscribe("waited", self._waited)

    def _backward(self) -> None:
        watched = self._fresh
        if watched is not None:
            watched.facts = replace(watched.facts, is_training=True)
        self._settle()

    def _settle(self) -> None:
        """Listen no more: the purpose of the loader is known."""
        self._fresh = None
        self._recorder.unsubscribe("end", self._settle)
        self._recorder.unsubscribe("backward", self._backward)

    # --- around fetches in the fit's process -------------------------------------------------------------------------------

    def _fetch(self, original: Function) -> Function:
        recorder = self._recorder

        def fetch(fetcher: Any, index: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:  # a worker's neither
                return original(fetcher, index)
            known, timer = self._current
            if known() is not fetcher:
                timer = recorder.attempt(self, "a fetch", self._timer_of, fetcher)
            if timer is None:
                return original(fetcher, index)
            batch, is_disturbed = timer.fetch(original, fetcher, index, recorder.turn)
            if is_disturbed:
                recorder.boundary("disturbed")
            return batch

        return fetch

    def _timer_of(self, fetcher: Any) -> FetchTimer | None:
        timer = self._counters.get(fetcher)
        self._current = weakref.ref(fetcher), timer
        return timer
