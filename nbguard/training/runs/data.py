"""Fingerprints of the data and of its split, by names and sizes of files, or the numbers themselves, bounded by a count."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.fingerprint import array_hash, is_tensor, spread, tensors_hash, texts_hash
from nbguard.training.runs.settings import LOADERS, Ingredients

_FILES = 1000
"""Files whose sizes are asked for, evenly spread over all: names are taken of all."""

_NAMES = 2_000_000
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


def collect_data(facts: FactCollector, ingredients: Ingredients) -> None:
    """Collect the fingerprints of the training and the validation set; nothing is loaded by the user's code."""
    if not ingredients.loaders:
        facts.miss("data", "training", "no loader was given")
    for name, loader in zip(LOADERS, ingredients.loaders, strict=False):
        dataset = attribute_of(loader, "dataset")
        if dataset is None:
            facts.miss("data", name, "its loader has no data set")
            continue
        facts.attempt("data", name, lambda name=name, dataset=dataset: _collect(facts, name, dataset))  # type: ignore[misc]


def _collect(facts: FactCollector, name: str, dataset: Any) -> None:
    """Collect one data set: items of a Learner's, indices of a subset, tensors, arrays or tables."""
    dataset, indices = _unwrapped(dataset)
    if indices is not None:
        facts.add("split", name, f"{len(indices)} items, {texts_hash(map(str, indices))}")
    items = _items(dataset)
    tensors = attribute_of(dataset, "tensors")
    if items is not None:
        _named(facts, name, items, is_split=indices is None)
    elif type(tensors) is tuple and all(map(is_tensor, tensors)):
        _numbers(facts, name, tensors)
    else:
        _attributes(facts, name, dataset)


def _unwrapped(dataset: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the data set inside of torch's `Subset`, with its indices, or None if it is no subset."""
    torch: Any = sys.modules["torch"]
    if torch.utils.data.Subset not in mro_of(type(dataset)):
        return dataset, None
    indices = attribute_of(dataset, "indices")
    plain = list(indices) if type(indices) in (list, tuple, range) else None
    if plain is None and is_tensor(indices) and indices.device.type == "cpu":
        plain = indices.tolist()
    return attribute_of(dataset, "dataset"), plain


def _items(dataset: Any) -> Any:
    """Return the items of a Learner's data set, of a table, or a list of them; None where there are none."""
    if type(dataset) in (list, tuple):
        return dataset
    pipelines = attribute_of(dataset, "tls")
    inner = attribute_of(pipelines, "items") if type(pipelines) is not list else pipelines
    first = inner[0] if type(inner) is list and inner else None
    for owner in (dataset, first):
        items = attribute_of(owner, "items") if owner is not None else None
        if items is not None:
            return items
    for name in ("samples", "imgs"):  # torchvision's folders of pictures
        if type(samples := attribute_of(dataset, name)) is list:
            return samples
    return None


def _named(facts: FactCollector, name: str, items: Any, *, is_split: bool) -> None:
    """Collect items by their names. The order counts: a loader that does not shuffle takes them in it."""
    if name_of(type(items)) == "DataFrame":
        _table(facts, name, items, is_split=is_split)
        return
    inner = attribute_of(items, "items")
    plain = items if type(items) in (list, tuple) else inner if type(inner) is list else None
    if plain is None:
        _attributes(facts, name, items)
        return
    names = [_name(item) for item in plain[:_NAMES]]
    if any(each is None for each in names):
        kind = name_of(type(plain[names.index(None)]))
        facts.miss("data", name, f"its items are of the type {kind}, which has no name that could be read")
        return
    texts = [each for each in names if each is not None]
    common = os.path.commonpath(texts) if len(texts) > 1 and _are_files(plain) else ""
    relative = [text[len(common) :] for text in texts]
    facts.add("data", f"{name} items", len(plain))
    facts.add("split" if is_split else "data", f"{name} names", texts_hash(relative))
    if _are_files(plain):
        facts.add("data", "folder", common)
        _files(facts, name, texts)


def _name(item: Any) -> str | None:
    """Return an item's name: a path, a text, a number, or a tuple of these; None for anything else."""
    kind = type(item)
    if kind in (str, int, float, bool):
        return str(item)
    if kind.__module__.startswith("pathlib") and kind.__name__ in _PATHS:
        return str(item)
    if kind in (tuple, list):
        parts = [_name(part) for part in item]
        return None if None in parts else " ".join(part for part in parts if part is not None)
    return None


def _are_files(items: Sequence[Any]) -> bool:
    return bool(items) and type(items[0]).__module__.startswith("pathlib")


def _files(facts: FactCollector, name: str, paths: Sequence[str]) -> None:
    """Collect the sizes of files, and when the newest of them was changed."""
    sizes, newest = [], 0.0
    for place in spread(len(paths), _FILES):
        try:
            status = Path(paths[place]).stat()
        except OSError:
            sizes.append("missing")
            continue
        sizes.append(str(status.st_size))
        newest = max(newest, status.st_mtime)
    facts.add("data", f"{name} sizes", f"{texts_hash(sizes)} of {len(sizes)} files")
    if newest:
        facts.add("data", "newest change", datetime.fromtimestamp(newest, timezone.utc).isoformat(timespec="seconds"))


def _numbers(facts: FactCollector, name: str, tensors: Sequence[Any]) -> None:
    facts.add("data", f"{name} shapes", ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors))
    try:
        facts.add("data", f"{name} numbers", tensors_hash(tensors))
    except ValueError as error:
        facts.miss("data", f"{name} numbers", str(error))


def _table(facts: FactCollector, name: str, table: Any, *, is_split: bool) -> None:
    """Collect a table of pandas: its columns of numbers by their bytes, its index as the split."""
    pandas: Any = sys.modules["pandas"]
    plain = pandas.DataFrame(table)
    facts.add("data", f"{name} rows", len(plain))
    columns = [str(column) for column in plain.columns if type(column) is str]
    facts.add("data", f"{name} columns", f"{len(plain.columns)}, {texts_hash(columns)}")
    hashes, left = [], []
    for place, column in enumerate(plain.columns):
        values = plain.iloc[:, place]
        numbers = values.cat.codes if name_of(type(values.dtype)) == "CategoricalDtype" else values
        try:
            hashes.append(array_hash(numbers.to_numpy()))
        except (ValueError, AttributeError):
            left.append(str(column) if type(column) is str else f"column {place}")
    facts.add("data", f"{name} numbers", texts_hash(hashes))
    if left:
        facts.miss("data", f"{name} texts", f"columns of objects are not read: {', '.join(left[:8])}")
    if is_split:
        facts.attempt("split", name, lambda: facts.add("split", f"{name} index", array_hash(plain.index.to_numpy())))


def _attributes(facts: FactCollector, name: str, dataset: Any) -> None:
    """Collect the tensors and arrays that a data set of the user's has as attributes, and the lists of names."""
    from nbguard.memory.scan.heap.kinds import attributes_of

    numpy: Any = sys.modules.get("numpy")
    own = attributes_of(dataset) or {}
    known = 0
    for attribute, value in list(own.items())[:50]:
        if is_tensor(value):
            facts.add("data", f"{name} {attribute}", f"{tuple(value.shape)} {tensors_hash([value])}")
        elif numpy is not None and type(value) is numpy.ndarray:
            facts.add("data", f"{name} {attribute}", f"{value.shape} {array_hash(value)}")
        elif type(value) in (list, tuple) and value and None not in (names := [_name(item) for item in value[:_NAMES]]):
            facts.add("data", f"{name} {attribute}", f"{len(value)} items, {texts_hash(each or '' for each in names)}")
        else:
            continue
        known += 1
    if not known:
        facts.miss("data", name, f"a {name_of(type(dataset))} keeps its data in its own way")
