"""The time of a batch on its way to the model, in parts from reading to the copy to the device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nbguard.training.profiler.analysis.loader.fetches import FetchFacts, LoaderFacts, storage_wait
from nbguard.training.profiler.analysis.loader.slowest import FetchFunction, FetchProfile
from nbguard.training.profiler.analysis.time import phases

READING, DECODING, ITEMS, COLLATION, REST = "reading", "decoding", "item transforms", "collation", "other"

_DECODERS = (
    "/PIL/ImageFile.py", "ImagePlugin.py", "/cv2/", "/h5py/", "/imageio/", "/numpy/lib/_npyio_impl.py", "/numpy/lib/npyio.py",
    "/pandas/io/", "/skimage/io/", "/soundfile.py", "/torch/serialization.py", "/torchaudio/", "/torchcodec/",
    "/torchvision/datasets/folder.py", "/torchvision/io/",
)  # fmt: skip
"""Files of libraries that open files and decode them."""
_ALSO = (("/PIL/Image.py", frozenset({"open"})), ("/fastai/vision/core.py", frozenset({"create", "load_image"})))
"""Files where only these functions do so."""
_IN_C = re.compile(r"\b(imread|imdecode|decompress|_pickle\.loads?)\b")
_READS = re.compile(r"\b_io\.|\bposix\.(open|read|pread)\b|'_io\.")
"""Functions of Python itself, written in C, that read from files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart:
    """One part of the way of a batch."""

    name: str  # "decoding"
    time: int  # nanoseconds of a batch; for workers' parts, in one of them


def loader_parts(loader: LoaderFacts, medians: Mapping[str, int]) -> tuple[LoaderPart, ...]:
    """Return the parts in their order, those that take no time left out; none where no fetch was profiled.

    Args:
        loader: that of the training batches.
        medians: of a batch's phases in the steady state, by name.
    """
    parts = dict(_made(loader.fetch))
    if not parts:
        return ()
    parts |= {phases.TRANSFORMS: medians.get(phases.TRANSFORMS, 0), phases.TO_DEVICE: medians.get(phases.TO_DEVICE, 0)}
    return tuple(LoaderPart(name=name, time=time) for name, time in parts.items() if time > 0)


def _made(fetch: FetchFacts) -> Iterator[tuple[str, int]]:
    """Yield the parts of making a batch: shares of the profiled fetches, applied to the time of the others."""
    if not fetch.steps or not fetch.profiled or not fetch.profiled_time:
        return
    profiled = fetch.profiled_time // fetch.profiled
    whole = profiled if fetch.median is None else min(fetch.median, profiled)
    collation = sum(step.time for step in fetch.steps if step.kind == "collate")
    items = sum(step.time for step in fetch.steps) - collation
    scale = whole / max(fetch.profiled_time, items + collation)
    waited = storage_wait(fetch)
    reading = max(round(fetch.in_files * scale), 0 if waited is None else waited[0])
    reading = min(reading, whole)
    decoding = min(round(fetch.decoding * scale), whole - reading)
    items = max(0, round(items * scale) - reading - decoding)
    collation = min(round(collation * scale), whole - reading - decoding - items)
    yield from ((READING, reading), (DECODING, decoding), (ITEMS, items), (COLLATION, collation))
    yield REST, whole - reading - decoding - items - collation


def file_work(profile: FetchProfile) -> tuple[int, int]:
    """Return the nanoseconds that fetches spent reading from files, and those spent decoding."""
    reads = [not function.file and bool(_READS.search(function.name)) for function in profile.functions]
    decodes = list(map(_decodes, profile.functions))
    callees = {call.callee for calls in profile.calls.values() for call in calls}
    left = [number for number in range(len(profile.functions)) if number not in callees]
    outside = set(left)  # functions that are reached without a decoder
    decoding = 0
    while left:
        for call in profile.calls.get(left.pop(), ()):
            if decodes[call.callee]:
                decoding += call.time
            elif call.callee not in outside:
                outside.add(call.callee)
                left.append(call.callee)
    found = [(caller, call.time) for caller, calls in profile.calls.items() for call in calls if reads[call.callee]]
    within = sum(time for caller, time in found if caller not in outside)
    return sum(time for _, time in found), max(0, decoding - within)


def _decodes(function: FetchFunction) -> bool:
    if not function.file:
        return bool(_IN_C.search(function.name))
    return any(part in function.file for part in _DECODERS) or any(
        part in function.file and function.short in names for part, names in _ALSO
    )
