"""The loader part of a profile on real loaders: planted costs are named with their size, and nothing of the user's changes."""

from __future__ import annotations

import cProfile
import gc
import multiprocessing
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest
import torch
from fastai.basics import SGD, Datasets, ItemTransform, Learner, TfmdLists, Transform
from fastai.callback import progress as progress  # adds `no_bar`
from fastai.data.block import DataBlock
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, dataloader
from torch.utils.data._utils import fetch, worker

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.slowest import PythonRows, reading, slowest, training_loader
from nbguard.training.profiler.instruments import loader_watch as own_memory
from nbguard.training.profiler.instruments.fetching import BytesRead, FetchTimer, ReadMeter
from nbguard.training.profiler.instruments.loader_watch import LoaderWatch
from nbguard.units import MiB
from tests.profiler.recording import recording
from tests.profiler.sleepy_rows import SLEEP, SleepyRows

BATCH = 4
BATCHES = 8
PLANTED = 0.005

ROOM = 1000
taken = multiprocessing.RawArray("d", 2 * ROOM)
"""What the planted cost really took on this machine, in seconds: of each process their number, and then each of them."""


@pytest.fixture(autouse=True)
def forked_workers() -> Iterator[None]:
    """Only forked workers know the functions of this file and share `taken`; since Python 3.14 others are usual."""
    usual = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(usual, force=True)


def cost(times: int = 1) -> None:
    begin = time.perf_counter()
    time.sleep(PLANTED * times)
    note(time.perf_counter() - begin)


def note(seconds: float) -> None:
    worker = torch.utils.data.get_worker_info()
    at = 0 if worker is None else worker.id * ROOM
    taken[at] += 1
    taken[at + int(taken[at])] = seconds


def real() -> list[float]:
    """Return what each of the planted costs took, in nanoseconds, the least first."""
    return sorted(taken[at + i + 1] * 1e9 for at in (0, ROOM) for i in range(int(taken[at])))


def slow_transform(x: torch.Tensor) -> torch.Tensor:
    cost()
    return x * 2


class SlowCall:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        cost()
        return x


class SlowModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cost()
        return x


class SlowTransform(Transform):
    def encodes(self, x: torch.Tensor) -> torch.Tensor:
        cost()
        return x


class SlowItem(ItemTransform):
    def encodes(self, xy: Any) -> Any:
        cost()
        return xy


def slow_collate(items: list[Any]) -> Any:
    cost(BATCH)
    return torch.utils.data.default_collate(items)


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, transform: Callable[[Any], Any] = lambda x: x, n: int = BATCH * BATCHES) -> None:
        self.transform, self.n = transform, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((8,), float(i))
        return self.transform(x), x.sum() / 100


class SlowRows(Rows):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.perf_counter()
        time.sleep(PLANTED)
        note(time.perf_counter() - begin)
        return super().__getitem__(i)


class WaitingRows(Rows):
    """Each item takes a function of a library, which is written in Python."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.perf_counter()
        Event().wait(PLANTED)
        note(time.perf_counter() - begin)
        return super().__getitem__(i)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        for i in range(BATCH * BATCHES):
            yield slow_transform(torch.full((8,), float(i))), torch.ones(())


@contextmanager
def watched() -> Iterator[LoaderWatch]:
    watch = LoaderWatch()
    with recording(watch):
        yield watch


def fit(loader: Any, epochs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            ((net(x)[:, 0] - y) ** 2).mean().backward()
            optimizer.step()
    return net


def fit_fastai(loader: Any) -> None:
    from fastai.data.core import DataLoaders

    learner = Learner(
        DataLoaders(loader, loader), nn.Linear(8, 1), loss_func=lambda p, y: ((p[:, 0] - y) ** 2).mean(), opt_func=SGD
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, 1e-6)


def torch_loader(dataset: Any, workers: int, **more: Any) -> Any:
    return DataLoader(dataset, batch_size=BATCH, num_workers=workers, **more)


def block(workers: int) -> Any:
    rows = list(range(BATCH * BATCHES))
    data = DataBlock(
        get_x=lambda i: torch.full((8,), float(i)),
        get_y=lambda i: torch.tensor(i / 100),
        splitter=lambda items: (rows, [0]),
        item_tfms=SlowTransformOfX(),
    )
    return data.dataloaders(rows, bs=BATCH, num_workers=workers, device="cpu").train


class SlowTransformOfX(ItemTransform):
    def encodes(self, xy: Any) -> Any:
        cost()
        return xy


def composed(*steps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torchvision's composition of modules and of functions that it wraps."""
    from torchvision import transforms  # here: see `pytest_collection_modifyitems`

    return cast(
        "Callable[[Any], Any]",
        transforms.Compose([step if isinstance(step, nn.Module) else transforms.Lambda(step) for step in steps]),
    )


def lists(workers: int) -> Any:
    rows = list(range(BATCH * BATCHES))
    x = TfmdLists(rows, [lambda i: torch.full((8,), float(i)), SlowTransform()])
    y = TfmdLists(rows, [lambda i: torch.tensor(i / 100)])
    return Datasets(tls=[x, y]).dataloaders(bs=BATCH, num_workers=workers, device="cpu").train


PLANTS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], str, str]] = {
    "__getitem__ itself": (lambda k: torch_loader(SlowRows(), k), fit, "SlowRows.__getitem__", "dataset"),
    "a library's function": (lambda k: torch_loader(WaitingRows(), k), fit, "WaitingRows.__getitem__", "dataset"),
    "a function": (lambda k: torch_loader(Rows(slow_transform), k), fit, "slow_transform", "transform"),
    "an object": (lambda k: torch_loader(Rows(SlowCall()), k), fit, "SlowCall", "transform"),
    "torchvision": (
        lambda k: torch_loader(Rows(composed(lambda x: x + 1, SlowModule(), lambda x: x - 1)), k),
        fit,
        "SlowModule",
        "transform",
    ),
    "a function in torchvision": (
        lambda k: torch_loader(Rows(composed(slow_transform)), k),
        fit,
        "slow_transform",
        "transform",
    ),
    "collate": (lambda k: torch_loader(Rows(), k, collate_fn=slow_collate), fit, "slow_collate", "collate"),
    "a stream": (lambda k: torch_loader(Stream(), k), fit, "slow_transform", "transform"),
    "DataBlock": (block, fit_fastai, "SlowTransformOfX", "transform"),
    "TfmdLists": (lists, fit_fastai, "SlowTransform", "transform"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_cost_is_named_with_its_size(plant: str, workers: int) -> None:
    make, train, name, kind = PLANTS[plant]
    loader = make(workers)
    taken[:] = [0.0] * len(taken)
    with watched() as watch:
        train(loader)
    facts = training_loader(watch.observe())

    assert facts is not None
    assert facts.workers == workers
    slow = slowest(facts.fetch)
    assert slow is not None, facts
    assert (slow.step.name, slow.step.kind, slow.step.function.file) == (name, kind, "test_loader.py")
    assert ("wait`" in slow.step.function.library) is (plant == "a library's function")
    assert round(slow.calls) == (1 if kind == "collate" else BATCH)
    durations = real()
    assert durations[0] >= PLANTED * 1e9
    assert 0.8 * durations[0] <= slow.per_call <= 1.2 * durations[len(durations) * 9 // 10]  # others use the machine, too
    assert slow.per_batch == pytest.approx(slow.per_call * round(slow.calls), rel=0.01)
    assert slow.per_batch <= slow.fetch


def test_the_setup_of_a_loader_is_read() -> None:
    loader = torch_loader(Rows(), 2, persistent_workers=True, prefetch_factor=3)
    with watched() as watch:
        fit(loader, epochs=2)
        for _ in DataLoader(Rows(n=4), batch_size=2):
            pass
    training, other = watch.observe()

    assert training.dataset == "Rows"
    assert (training.workers, training.persistent, training.prefetch, training.batch_size) == (2, True, 3, BATCH)
    assert (training.is_training, training.is_learners, training.is_iterable, training.iterators) == (True, False, False, 1)
    assert (training.start_method, training.in_order, training.pin_memory) == ("fork", True, False)
    assert training.fetch.fetches == 2 * BATCHES
    assert training.fetch.items == 2 * BATCHES * BATCH
    assert training.start is not None
    assert (other.workers, other.is_training, other.start_method, other.fetch.fetches) == (0, False, None, 2)


def test_a_fastai_loader_is_told_from_torchs() -> None:
    with watched() as watch:
        fit_fastai(lists(2))
    training = training_loader(watch.observe())
    assert training is not None
    assert (training.is_learners, training.dataset, training.batch_size, training.workers) == (True, "Datasets", BATCH, 2)
    assert not training.is_iterable


def test_training_is_the_same_with_and_without() -> None:
    def run() -> tuple[Any, ...]:
        import random

        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        dataset = Rows(lambda x: x + torch.rand(8) + float(np.random.rand()) + random.random())
        states = []
        for workers in (0, 2):
            net = fit(torch_loader(dataset, workers, shuffle=True), epochs=2)
            states += [
                net.weight.detach().clone(),
                torch.random.get_rng_state(),
                torch.tensor(np.random.get_state()[1].tolist()),
            ]
        return (*states, random.getstate())

    without = run()
    with watched():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(without[:-1], found[:-1], strict=True))
    assert without[-1] == found[-1]


def test_batches_that_were_profiled_are_told_apart() -> None:
    with watched() as watch:
        fit(torch_loader(Rows(), 0))
    boundaries = watch._recorder.stop().boundaries
    assert sum(boundary.kind == "disturbed" for boundary in boundaries) == watch.observe()[0].fetch.profiled == 3
    assert sum(boundary.kind == "batch" for boundary in boundaries) == BATCHES + 1


def test_a_dataset_is_never_asked_for_more() -> None:
    asked = multiprocessing.RawArray("i", BATCH * BATCHES)

    def count(x: torch.Tensor) -> torch.Tensor:
        asked[int(x[0])] += 1
        return x

    with watched():
        fit(torch_loader(Rows(count), 0))
        fit(torch_loader(Rows(count), 2))
    assert set(asked) == {2}


def test_everything_patched_goes_back_and_nothing_is_kept() -> None:
    fetchers = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher
    iterators = dataloader._BaseDataLoaderIter, dataloader._MultiProcessingDataLoaderIter
    places = *((each, "fetch") for each in fetchers), *((each, "__init__") for each in iterators)
    before = [vars(owner)[name] for owner, name in places]
    with watched() as watch:
        assert all(vars(owner)[name] is not was for (owner, name), was in zip(places, before, strict=True))
        loader = torch_loader(Rows(slow_transform, n=BATCH * 3), 0)
        fit(loader)
        assert watch.loader() is loader
        gone = [weakref.ref(loader), weakref.ref(loader.dataset)]
        del loader
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
    assert [vars(owner)[name] for owner, name in places] == before
    assert watch.loader() is None
    assert watch.observe()


def test_workers_of_before_are_not_known() -> None:
    early = torch_loader(Rows(), 1, persistent_workers=True)
    list(early)
    with watched() as watch:
        fit(early)
    (facts,) = watch.observe()
    assert facts.fetch.note == "not known: the workers were started before the profile"
    assert slowest(facts.fetch) is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_are_timed_however_they_are_started(method: str) -> None:
    """Python 3.14 starts them by a server of forks: such a worker inherits nothing, and is given what it needs."""
    workers = 2 if method == "fork" else 1  # the others import PyTorch anew
    loader = torch_loader(SleepyRows(BATCH * BATCHES), workers, multiprocessing_context=method)
    loop = worker._worker_loop
    with watched() as watch:
        fit(loader, epochs=2)
    (facts,) = watch.observe()
    assert (facts.start_method, facts.fetch.fetches, facts.fetch.note) == (method, 2 * BATCHES, "")
    slow = slowest(facts.fetch)
    assert slow is not None
    assert slow.step.name.endswith("SleepyRows.__getitem__")
    assert facts.fetch.median is not None
    assert facts.fetch.median >= BATCH * SLEEP * 1e9
    assert worker._worker_loop is loop


def test_a_loader_that_cannot_start_its_workers_fails_as_without_us() -> None:
    loader = torch_loader(Rows(lambda x: x), 1, multiprocessing_context="spawn")
    loop = worker._worker_loop
    with watched(), pytest.raises((AttributeError, pickle.PicklingError)), pytest.warns(UserWarning, match="pickle"):
        fit(loader)
    assert worker._worker_loop is loop


def test_another_profiler_is_left_alone_and_counts_few_calls_of_ours() -> None:
    profiler = cProfile.Profile()
    with watched() as watch:
        profiler.enable()
        fit(torch_loader(Rows(), 0))
        profiler.disable()
    profiler.create_stats()
    stats = profiler.stats  # type: ignore[attr-defined]
    assert any(name == "fit" for _, _, name in stats)
    ours = sum(calls for (file, *_), (calls, *_) in stats.items() if file.endswith(("loader/fetching.py", "loader/tune.py")))
    assert ours <= 12 * BATCHES + 60  # a fetch costs a handful of calls, those told of phases and batches included
    (facts,) = watch.observe()
    assert facts.fetch.profiled == 0
    assert facts.fetch.fetches == BATCHES


def test_workers_that_outlive_the_profile_take_the_clock_away() -> None:
    where = multiprocessing.RawArray("c", 200)

    def look(x: torch.Tensor) -> torch.Tensor:
        where.value = fetch._MapDatasetFetcher.fetch.__code__.co_filename.encode()[-100:]
        return x

    loader = torch_loader(Rows(look), 1, persistent_workers=True)
    with watched():
        fit(loader)
        assert where.value.endswith(b"nbguard/training/profiler/instruments/loader_watch.py")
    fit(loader, epochs=2)
    assert where.value.endswith(b"torch/utils/data/_utils/fetch.py")


def test_an_error_in_a_dataset_is_the_users_own() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        if x[0] == BATCH + 1:  # in the second fetch, which is profiled
            raise KeyError("mine")
        return x

    for workers in (0, 1):
        gc.collect()  # torch's iterators that wait for it would be ended by a worker, which takes five seconds
        with watched() as watch, pytest.raises(KeyError, match="mine"):
            fit(torch_loader(Rows(fail), workers))
        assert watch.observe()[0].fetch.fetches >= 1


@pytest.mark.parametrize("indices", [[3, 1, 2], (3, 1, 2)], ids=["list", "tuple"])
def test_the_items_of_a_fetch_are_counted_however_its_indices_come(indices: Any) -> None:
    timer = FetchTimer()
    timer.fetch(lambda _, index: index, None, indices)  # the first one is not profiled
    assert (timer.fetches, timer.items) == (1, 3)


class Files(Rows):
    """Each item reads a file of its own, which is in the page cache: it was written just now."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__()
        self.folder, self.nbytes = folder, nbytes
        for i in range(self.n):
            (folder / f"{i}").write_bytes(bytes(nbytes))

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        with (self.folder / f"{i}").open("rb", buffering=0) as file:
            assert len(file.read(self.nbytes)) == self.nbytes
        return super().__getitem__(i)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count what a thread reads")
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_reads_is_measured(workers: int, tmp_path: Path) -> None:
    with watched() as watch:
        fit(torch_loader(Files(tmp_path, 100_000), workers), epochs=2)

    (facts,) = watch.observe()
    assert facts.fetch.metered == facts.fetch.profiled >= 3
    assert facts.fetch.read == pytest.approx(facts.fetch.metered * BATCH * 100_000, rel=0.01)  # a module may be imported in one
    found = reading(facts, 10**8)
    assert found is not None
    assert found.per_second == pytest.approx(10 * found.per_batch)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count how long a thread ran")
def test_a_meter_tells_waiting_from_work() -> None:
    meter = ReadMeter()
    time.sleep(0.1)
    waited = meter.stop()
    meter, begin = ReadMeter(), time.thread_time()
    while time.thread_time() - begin < 0.1:
        pass
    worked = meter.stop()
    assert waited is not None
    assert worked is not None
    assert waited.blocked > 90 * 10**6
    assert worked.blocked < waited.blocked / 2


def test_a_meter_counts_the_bytes_of_this_thread_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1_000_000))
    meter = ReadMeter()
    thread = Thread(target=file.read_bytes)
    thread.start()
    thread.join()
    with file.open("rb", buffering=0) as content:
        assert len(content.read(1_000_000)) == 1_000_000
    assert ReadMeter().stop() in (None, BytesRead())

    found = meter.stop()
    assert found is None or 1_000_000 <= found.calls < 1_001_000


class Listed(Rows):
    """Its rows are Python objects, or an array."""

    def __init__(self, rows: Any) -> None:
        super().__init__(n=len(rows))
        self.rows = rows

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.n // (BATCH * BATCHES)
        part = self.rows[i * size : (i + 1) * size]  # counts a reference to each of them
        return torch.full((8,), float(len(part))), torch.zeros(1)

    def __len__(self) -> int:
        return BATCH * BATCHES


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell shared memory from a worker's own")
def test_what_workers_copy_of_python_objects_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "_SELDOM", 0)  # a look after each batch: these epochs are short
    count = 1_000_000
    held = [float(i) for i in range(count)]
    for dataset, rows in (
        (Listed(held), PythonRows("rows", "list", count)),
        (Subset(Listed(held), range(BATCH * BATCHES)), PythonRows("dataset.rows", "list", count)),  # type: ignore[arg-type]
        (Listed(np.arange(float(count))), None),
    ):
        with watched() as watch:
            fit(torch_loader(dataset, 2))
        (facts,) = watch.observe()
        assert facts.rows == rows
        assert (facts.copied > count * 12) is (rows is not None)  # a float has 24 bytes, the first batches are not counted
        assert facts.copied < 2 * (count * 32 + 40 * MiB)

    with watched() as watch:
        fit(torch_loader(Listed(held), 0))
    (facts,) = watch.observe()
    assert (facts.copied, facts.rows) == (0, None)  # the fit's own process has them once


class Slow:
    """A dataset whose items take a while, and that counts how many were made."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.made += 1
        time.sleep(0.002)
        return torch.ones(256), torch.ones(1)


@pytest.mark.parametrize("is_learners", [False, True])
def test_items_that_are_kept_take_what_was_said_and_are_made_once(is_learners: bool) -> None:
    from fastai.basics import DataLoader as LearnersLoader
    from fastai.basics import DataLoaders

    data, model = Slow(), nn.Linear(256, 1)
    fastais = LearnersLoader(data, bs=BATCH, num_workers=0)
    learn = Learner(DataLoaders(fastais, []), model, loss_func=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def fit(rows: Any) -> None:
        if is_learners:
            with learn.no_bar(), learn.no_logging():
                learn.fit(2, lr=1e-4)
            return
        for _ in range(2):
            for x, y in DataLoader(rows, batch_size=BATCH):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    with profile_fit(show=False) as profile:
        fit(data)
    (found,) = [finding for finding in profile.report.loader.advice if finding.kind == "items"]
    assert found.nbytes == 32 * 4 * (256 + 1)
    names = {"learn": learn, "data": data}
    exec(found.change.split("`")[1], names)
    before = data.made
    fit(names.get("items"))
    assert data.made - before == (32 if is_learners else 0)
