"""The way of a batch in parts: from profiles made by hand, and of real loaders; and the line that keeps items, executed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import nbguard
from nbguard.render.text import blocks_text
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.analysis.slowest import (
    FetchCall,
    FetchFacts,
    FetchFunction,
    FetchProfile,
    FetchStep,
    LoaderFacts,
    file_work,
    loader_parts,
)
from nbguard.units import format_bytes

_PACKAGES = "/lib/python3/site-packages"
_PARTS = ("reading", "decoding", "item transforms", "collation", "other", "batch transforms", "to device")


def function(name: str, file: str = "") -> FetchFunction:
    return FetchFunction(name=name, file=file, line=1 if file else 0, is_users=_PACKAGES not in file and bool(file))


def step(kind: Any, time: int) -> FetchStep:
    return FetchStep(function(kind, "data.py"), kind, 1, time)


def parts_of(fetch: FetchFacts, **medians: int) -> dict[str, int]:
    named = {name.replace("_", " "): time for name, time in medians.items()}
    return {part.name: part.time for part in loader_parts(LoaderFacts(dataset="D", fetch=fetch), named)}


STEPS = (step("dataset", 600), step("transform", 200), step("collate", 100))


def test_the_parts_add_up_to_a_batch() -> None:
    fetch = FetchFacts(median=500, profiled=1, profiled_time=1000, in_files=100, decoding=300, steps=STEPS)

    assert parts_of(fetch, to_device=7, batch_transforms=3) == {
        "reading": 50,
        "decoding": 150,
        "item transforms": 200,
        "collation": 50,
        "other": 50,
        "batch transforms": 3,
        "to device": 7,
    }
    assert parts_of(FetchFacts(median=500)) == {}


@pytest.mark.parametrize("in_files", [0, 100, 5000])
@pytest.mark.parametrize("decoding", [0, 700, 5000])
@pytest.mark.parametrize("blocked", [0, 400, 5000])
def test_no_part_is_less_than_nothing_whatever_was_measured(in_files: int, decoding: int, blocked: int) -> None:
    fetch = FetchFacts(
        median=500, profiled=1, profiled_time=800, in_files=in_files, decoding=decoding, steps=STEPS,
        metered=1, stored=10, blocked=blocked, ran=100,
    )  # fmt: skip
    parts = parts_of(fetch)

    assert all(time > 0 for time in parts.values())
    assert sum(parts.values()) == 500
    assert list(parts) == [name for name in _PARTS if name in parts]


def test_decoding_is_counted_once_and_without_the_reading_in_it() -> None:
    functions = (
        function("fetch", f"{_PACKAGES}/torch/utils/data/_utils/fetch.py"),
        function("Data.__getitem__", "data.py"),
        function("pil_loader", f"{_PACKAGES}/torchvision/datasets/folder.py"),
        function("Image.convert", f"{_PACKAGES}/PIL/Image.py"),
        function("ImageFile.load", f"{_PACKAGES}/PIL/ImageFile.py"),
        function("<method 'read' of '_io.BufferedReader' objects>"),
        function("Resize.forward", f"{_PACKAGES}/torchvision/transforms/transforms.py"),
        function("<built-in method imread>"),
    )
    calls = {
        0: (FetchCall(1, 1, 1000, 10),),
        1: (FetchCall(2, 1, 500, 10), FetchCall(6, 1, 300, 300), FetchCall(5, 1, 40, 40), FetchCall(7, 1, 60, 60)),
        2: (FetchCall(3, 1, 450, 50),),
        3: (FetchCall(4, 1, 400, 300),),
        4: (FetchCall(5, 2, 100, 100),),
    }
    profile = FetchProfile(functions, calls, (1,) * 8, (0,) * 8)

    assert file_work(profile) == (140, 460)


class Pictures(Dataset[Any]):
    """Pictures in files, which are decoded for each item."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "picture.png"
        Image.frombytes("RGB", (600, 600), os.urandom(3 * 600 * 600)).save(self.file, compress_level=1)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.file) as picture:
            pixels = picture.convert("RGB").tobytes()
        time.sleep(0.002)
        return torch.frombuffer(bytearray(pixels[:3000]), dtype=torch.uint8) / 255, index % 2


def collate(items: list[Any]) -> Any:
    time.sleep(0.004)
    return torch.utils.data.default_collate(items)


def fit(loader: Any) -> FitReport:
    model = torch.nn.Linear(3000, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nbguard.profile_fit(show=False) as profile:
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile.report


def test_real_batches_are_divided_and_the_line_keeps_what_it_says(tmp_path: Path) -> None:
    data = Pictures(tmp_path)
    report = fit(DataLoader(data, batch_size=4, collate_fn=collate))
    assert report.loader is not None
    parts = {part.name: part.time for part in report.loader.parts}
    assert {"decoding", "item transforms", "collation"} <= parts.keys() <= set(_PARTS)
    assert min(parts.values()) > 0
    assert "decoding" in blocks_text(report.blocks())
    assert "decoding" not in blocks_text(report.blocks(whole=False))

    (found,) = [each for each in report.loader.advice if each.kind == "items"]
    assert found.severity == "note"
    line = re.findall("`([^`]+)`", found.change)[0]
    names: dict[str, Any] = {"data": data}
    exec(line, names)
    items = names["items"]
    kept = [x for x, _ in items]
    # A batch has its targets as a tensor, too: 8 bytes an item.
    assert found.nbytes == sum(x.nbytes for x in kept) + 8 * len(data)
    assert format_bytes(found.nbytes) in found.what
    for one, other in zip(DataLoader(data, batch_size=4), DataLoader(items, batch_size=4), strict=True):
        assert all(map(torch.equal, one, other))


def test_workers_tell_their_parts_too(tmp_path: Path) -> None:
    report = fit(DataLoader(Pictures(tmp_path), batch_size=4, collate_fn=collate, num_workers=1))

    assert report.loader is not None
    assert {"decoding", "item transforms", "collation"} <= {part.name for part in report.loader.parts}
