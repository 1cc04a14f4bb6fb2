"""The settings of a loader, read from its iterator."""

from __future__ import annotations

import linecache
import multiprocessing
from dataclasses import replace
from functools import partial
from typing import Any

from nbguard.profiler.analysis.loader.fetches import LoaderFacts
from nbguard.profiler.analysis.loader.slowest import FetchFunction, FetchStep
from nbguard.profiler.instruments.loader.own_memory import python_rows
from nbguard.scan.devices.allocation_sites import Sites
from nbguard.scan.heap.attributes import attribute_of


def facts_of_iterator(iterator: Any, loader: Any | None) -> LoaderFacts:
    """Return how a loader is set up, from torch's iterator over it and, where it is known, torch's loader."""
    attribute = partial(attribute_of, iterator)
    dataset, is_iterable = attribute("_dataset"), getattr(attribute("_dataset_kind"), "real", 0) == 1
    batch_size = attribute_of(loader, "batch_size") or attribute_of(attribute_of(loader, "batch_sampler"), "batch_size")
    fastai = attribute_of(dataset, "d") if type(dataset).__name__ == "_FakeLoader" else None
    if fastai is not None:  # torch sees an iterable stand-in; fastai's loader is behind it
        inner = partial(attribute_of, fastai)
        dataset, is_iterable, batch_size = inner("dataset"), not inner("indexed"), inner("bs")
    workers = attribute("_num_workers")
    return LoaderFacts(
        dataset=type(dataset).__name__,
        is_fastai=fastai is not None,
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
