"""Recorded runs that ran out of memory, as snapshot files: the allocator's golden runs from several points on, and a GPU's."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path

from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS
from tests.cli.test_files import snapshot_file
from tests.gpu import recording

_CUTS = (0, 700, 1400, 2100)
"""Events that are left out at the beginning, as by a history of bounded length."""
_MOST = 50
_GPU = Path(__file__).parents[1] / "data" / "gpu"
_ON_A_GPU = ("oom", "oom-expandable")


@functools.cache
def out_of_memory() -> tuple[str, ...]:
    """Return the names of the cases: `2.13.0_118+700`, `gpu:oom`; at most fifty."""
    on_a_gpu = [f"gpu:{name}" for name in _ON_A_GPU if (_GPU / f"{name}{recording.SUFFIX}").exists()]
    return (*on_a_gpu, *list(_golden())[: _MOST - len(on_a_gpu)])


def _golden() -> Iterator[str]:
    """Yield the golden runs in which a request fails, each from its beginning, then from the first cut on, and so on."""
    last = {path.name.removesuffix(recording.SUFFIX): _last_refusal(path) for path in RUNS}
    for cut in _CUTS:
        yield from (f"{name}+{cut}" for name, place in last.items() if place >= cut)


def _last_refusal(path: Path) -> int:
    return max((place for place, event in enumerate(oracle.read(path)["events"]) if event[0] == "oom"), default=-1)


def written(case: str, folder: Path) -> Path:
    """Write a case as PyTorch would have, and return its file."""
    if case.startswith("gpu:"):
        name = case.removeprefix("gpu:")
        file = folder / f"{name}.pickle"
        file.write_bytes(pickle.dumps(recording.unpacked(dict(recording.load_all(_GPU))[name])))
        return file
    name, _, cut = case.partition("+")
    return snapshot_file(folder, name, cut=int(cut))
