"""A loader as it is set up, and the memory that a forked worker of it has copied."""

from __future__ import annotations

import linecache
import multiprocessing
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, namespace_of
from nbguard.training.profiler.analysis.loader.slowest import FetchFunction, FetchStep, LoaderFacts, PythonRows


def facts_of_iterator(iterator: Any, loader: Any | None) -> LoaderFacts:
    """Return how a loader is set up, from torch's iterator over it and, where it is known, torch's loader."""
    attribute = partial(attribute_of, iterator)
    dataset, is_iterable = attribute("_dataset"), getattr(attribute("_dataset_kind"), "real", 0) == 1
    batch_size = attribute_of(loader, "batch_size") or attribute_of(attribute_of(loader, "batch_sampler"), "batch_size")
    learners = attribute_of(dataset, "d") if type(dataset).__name__ == "_FakeLoader" else None
    if learners is not None:  # torch sees an iterable stand-in; the Learner's loader is behind it
        inner = partial(attribute_of, learners)
        dataset, is_iterable, batch_size = inner("dataset"), not inner("indexed"), inner("bs")
    workers = attribute("_num_workers")
    return LoaderFacts(
        dataset=type(dataset).__name__,
        is_learners=learners is not None,
        is_iterable=is_iterable,
        workers=workers if type(workers) is int else 0,
        batch_size=batch_size if type(batch_size) is int else None,
        pin_memory=attribute("_pin_memory") is True or attribute_of(loader, "pin_memory") is True,
        persistent=attribute("_persistent_workers") is True,
        prefetch=attribute("_prefetch_factor"),
        in_order=attribute("_in_order"),
        start_method=_start_method(attribute("_workers")),
        rows=python_rows(dataset) if workers else None,
    )


def _start_method(workers: Any) -> str | None:
    """Return how worker processes were started: as their own kind says, or as is usual here."""
    if type(workers) is not list or not workers:
        return None
    own = getattr(type(workers[0]), "_start_method", None)
    return own or multiprocessing.get_start_method(allow_none=True)


def shown(step: FetchStep) -> FetchStep:
    """Return a step with its file as it is shown: a cell, or the file's name; and with its class, where Python did not say."""
    function = step.function
    place = Sites().place(function.file)
    return replace(step, function=replace(function, name=_qualified(function), file=place))


def _qualified(function: FetchFunction) -> str:
    """Return the name with its class. Python 3.10 does not tell it: there it is the class whose body the line is in."""
    if "." in function.name:
        return function.name
    lines = linecache.getlines(function.file)[: function.line]
    indent = _indent(lines[-1]) if lines else 0
    for line in reversed(lines):
        if line.strip() and _indent(line) < indent:
            words = line.replace("(", " ").replace(":", " ").split()
            return f"{words[1]}.{function.name}" if words[:1] == ["class"] else function.name
    return function.name


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_ROLLUP = "/proc/self/smaps_rollup"
"""See proc_pid_smaps(5). `Private_Dirty`: written by this process, and mapped by no other; `Anonymous`: of no file."""
_SELDOM = 100
"""Pause until the next scan in multiples of its length, so that scans take 1 % of a worker's time at most."""
_MANY = 10_000
"""Least objects of a container that is mentioned."""
_CONTAINERS = (list, tuple, dict, set, frozenset)
_WRAPPERS = ("dataset", "datasets")
"""Attributes of PyTorch's data sets, such as `Subset`, that have the one they are of."""
_DEPTH = 4


class CopiedMemory:
    """Measures, in a worker, the memory that it shared with the fit when it began and has copied since then."""

    def __init__(self) -> None:
        self._next = 0.0  # moment of the next scan
        self._first: tuple[int, int] | None = None
        self.nbytes: int = 0  # copied at the last scan

    def look(self) -> None:
        """Look, unless the last time was just now."""
        begin = perf_counter()
        if begin < self._next:
            return
        now = _private_and_all()
        end = perf_counter()
        self._next = end + _SELDOM * (end - begin) if now is not None else float("inf")
        if now is not None:
            self._first = self._first or now
            private, whole = now[0] - self._first[0], now[1] - self._first[1]
            self.nbytes = max(0, private - max(0, whole))  # new objects were never shared


def _private_and_all() -> tuple[int, int] | None:
    """Return the bytes that only this process has, and all of its own; None where the system does not say."""
    try:
        with open(_ROLLUP, "rb") as file:  # noqa: PTH123 - as quick as can be
            lines = file.read().splitlines()[1:]
        sizes = {line.partition(b":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes[b"Private_Dirty"] - sizes.get(b"Pss_Shmem", 0), sizes[b"Anonymous"]
    except (OSError, KeyError, ValueError, IndexError):
        return None


def python_rows(dataset: Any) -> PythonRows | None:
    """Return the largest container of Python objects that a data set has as an attribute; None where none is large."""
    found = max(_rows_of(dataset, "", _DEPTH), key=lambda rows: rows.count, default=None)
    return found if found is not None and found.count >= _MANY else None


def _rows_of(dataset: Any, path: str, depth: int) -> Iterator[PythonRows]:
    for name in _names_of(type(dataset)):
        value = attribute_of(dataset, name)
        if name in _WRAPPERS and depth and value is not None:
            places = {f"{path}{name}[{i}]": each for i, each in enumerate(value[:_DEPTH])} if type(value) is list else {}
            for place, each in (places or {f"{path}{name}": value}).items():
                yield from _rows_of(each, f"{place}.", depth - 1)
        elif type(value) in _CONTAINERS:
            yield PythonRows(f"{path}{name}", type(value).__name__, len(value))


def _names_of(cls: type) -> set[str]:
    """Return the names that methods of a class use: its attributes are among them, which are not listed without a cost."""
    functions = (each for base in mro_of(cls) for each in list(namespace_of(base).values()))
    return {name for each in functions if type(each) is types.FunctionType for name in each.__code__.co_names}
