"""`--tune-workers`: real loaders on trial, and everything of the user's as it was."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from fastai.data.core import TfmdDL, Transform
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbguard.training.profiler.analysis.loader_verdict import WorkerTuning
from nbguard.training.profiler.analysis.report import WorkerTrial
from nbguard.training.profiler.instruments.tune import tune

MS = 1_000_000
SHORT = 0.15


class Rows(Dataset):  # type: ignore[type-arg]
    """Each item takes `cost` seconds of sleep: two workers take half the time, on any number of cores."""

    def __init__(self, cost: float = 0.004, n: int = 400) -> None:
        self.cost, self.n = cost, n
        self.rng = np.random.default_rng(1)
        self.asked = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        self.asked += 1
        self.rng.random(), random.random(), np.random.rand(), torch.rand(1)
        time.sleep(self.cost)
        return torch.full((8,), float(i))


class Doubled(Transform):
    def encodes(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("batch transforms are no part of a trial: their time is not waited for")


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(4))


def states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def by_workers(trials: tuple[WorkerTrial, ...]) -> dict[int, int]:
    return {trial.workers: trial.per_batch for trial in trials}


def fastai_loader(rows: Rows) -> Any:
    return TfmdDL(rows, bs=4, num_workers=0, shuffle=True, device=torch.device("cpu"), after_batch=[Doubled()])


LOADERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "fastai": lambda: fastai_loader(Rows()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_two_workers_are_found_and_nothing_is_changed(kind: str) -> None:
    loader = LOADERS[kind]()
    before, children = states(), set(psutil.Process().children(recursive=True))
    own = loader.generator.get_state().tolist() if kind == "torch" else loader.rng.getstate()
    dataset = loader.dataset
    inner = dataset.asked, repr(dataset.rng.bit_generator.state)

    tuned = tune(loader, 12 * MS, seconds=SHORT, cores=2)

    figures = by_workers(tuned.trials)
    assert [*figures] == [0, 1, 2]
    assert figures[0] >= 16 * MS  # four items of 4 ms
    assert figures[2] < 0.75 * figures[0]
    assert tuned.best == 2
    assert tuned.sentence.startswith("2 workers: a batch every ")
    assert "with 0" in tuned.sentence
    assert (dataset.asked, repr(dataset.rng.bit_generator.state)) == inner
    assert (loader.generator.get_state().tolist() if kind == "torch" else loader.rng.getstate()) == own
    assert states() == before
    assert set(psutil.Process().children(recursive=True)) == children


def test_what_the_copy_does_is_as_the_loader_itself() -> None:
    """The same sampler, collate function and worker function, each batch as the user's loader makes it."""
    seen = multiprocessing.RawArray("i", 4)

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        seen[0] = max(seen[0], len(items))
        return torch.stack(items)

    def started(worker: int) -> None:
        seen[1 + worker] += 1

    loader = DataLoader(Rows(0.001), batch_size=5, collate_fn=collate, worker_init_fn=started, num_workers=1)
    tuned = tune(loader, MS // 1000, seconds=SHORT, cores=2)
    assert [*by_workers(tuned.trials)] == [0, 1, 2]
    assert seen[0] == 5
    assert seen[1]
    assert seen[2]


@pytest.mark.slow
def test_a_dataset_that_hangs_is_given_up_and_its_workers_are_gone(tmp_path: Path) -> None:
    class Hangs(Rows):
        def __getitem__(self, i: int) -> torch.Tensor:
            if torch.utils.data.get_worker_info():
                tmp_path.joinpath(str(os.getpid())).touch()
                time.sleep(1000)
            return super().__getitem__(i)

    begin = time.monotonic()
    tuned = tune(DataLoader(Hangs(), batch_size=4), MS, seconds=0.05, cores=2)
    assert time.monotonic() - begin < 60
    assert ([*by_workers(tuned.trials)], tuned.best) == ([0], 0)
    assert "stopped with 1 worker: no figure in" in tuned.sentence
    (pid,) = [int(file.name) for file in tmp_path.iterdir()]
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_error_of_the_dataset_is_told() -> None:
    class Fails(Rows):
        def __getitem__(self, i: int) -> torch.Tensor:
            raise KeyError("mine")

    assert tune(DataLoader(Fails()), MS, seconds=SHORT) == WorkerTuning(
        sentence="nothing was measured; stopped with no worker: KeyError: 'mine'"
    )


class H5File:
    """Stands for h5py's, which is not installed here: type and module are what is looked at."""


H5File.__module__, H5File.__name__ = "h5py._hl.files", "File"


def test_what_cannot_be_shared_with_a_fork_is_refused(tmp_path: Path) -> None:
    def refusal(**what: Any) -> str:
        rows = Rows()
        vars(rows).update(what)
        tuned = tune(DataLoader(rows), MS, seconds=SHORT)
        assert (tuned.trials, tuned.best) == ((), None)
        return tuned.sentence

    assert "an open SQLite connection" in refusal(db=sqlite3.connect(":memory:"))
    assert "an open HDF5 file (File): worker processes must open their own" in refusal(parts={"h5": [H5File()]})
    with tmp_path.joinpath("rows").open("w") as file:
        assert "an open file" in refusal(inner=Rows, file=file)
    assert tune(DataLoader(Stream()), MS).sentence == "not tuned: its dataset is a stream, which trials could use up"
    assert tune(None, MS).sentence.startswith("not tuned: the loader of the training batches is gone")


class Files(Dataset):  # type: ignore[type-arg]
    """Each item is a file's bytes."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> int:
        return len(self.paths[i].read_bytes())


def test_the_storage_of_its_files_is_measured_past_the_page_cache(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(12)]
    for path in paths:
        path.write_bytes(bytes(10_000))
    try:
        os.close(os.open(paths[0], os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct reads")

    found = tune(DataLoader(Files(paths), batch_size=4), 50 * MS, seconds=SHORT)

    assert found.storage is not None
    assert (found.storage.files, found.storage.nbytes) == (12, 120_000)
    assert found.storage.per_second > 0


def test_a_loader_without_files_has_no_storage() -> None:
    assert tune(LOADERS["torch"](), 50 * MS, seconds=SHORT).storage is None
