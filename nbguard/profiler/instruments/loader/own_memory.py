"""The memory that a forked worker has copied, and the Python objects of a data set whose reading copies it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from nbguard.profiler.analysis.loader.fetches import PythonRows
from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of, namespace_of

_ROLLUP = "/proc/self/smaps_rollup"
"""See proc_pid_smaps(5). `Private_Dirty`: written by this process, and mapped by no other; `Anonymous`: of no file."""
_SELDOM = 100
"""Times as long as a look takes until the next one: looks take 1 % of a worker's time at most."""
_MANY = 10_000
"""Objects from which a container is worth a word."""
_CONTAINERS = (list, tuple, dict, set, frozenset)
_WRAPPERS = ("dataset", "datasets")
"""Attributes in which data sets of PyTorch's, such as `Subset`, have the one that they are of."""
_DEPTH = 4


class CopiedMemory:
    """Measures, in a worker, the memory that it shared with the fit when it began and has copied since then."""

    def __init__(self) -> None:
        self._next = 0.0  # moment of the next look
        self._first: tuple[int, int] | None = None
        self.nbytes = 0  # copied at the last look

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
            self.nbytes = max(0, private - max(0, whole))  # what is new was never shared


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
