"""Memory of real fits on the CPU: what malloc counts, who holds what grows, what two recorded batches say."""

from __future__ import annotations

import gc
import itertools
import re
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import nbguard
from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.memory_growth import Level, MemoryObservations, growth_finding, memory_report
from nbguard.training.profiler.analysis.report import Growth, MemoryReport
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.instruments import growth_watch, timeline
from nbguard.training.profiler.instruments.memory_counters import HeapCounter, OlderStorages, SimulatedCounter
from nbguard.training.profiler.instruments.timeline import MOST_POINTS, LevelHistory, MemoryWatch
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop
from nbguard.units import KiB, MiB
from tests.profiler.recording import recording

WIDTH = 512
BATCH = 128
INPUT = BATCH * WIDTH * 4
SLOW = timeline._SLOW


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: small operations' threads would mostly wait for each other. Looks at pytest's heap may take their time.

    So may malloc's counter, which goes through all that other tests have freed.
    """
    monkeypatch.setattr(growth_watch, "_TOO_SLOW", 60.0)
    monkeypatch.setattr(timeline, "_SLOW", 1_000_000_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def watch(fit: Callable[[], Any], **settings: Any) -> MemoryReport | Unavailable:
    """Run a fit with nothing but the memory part of the profiler, and return what it says."""
    part = MemoryWatch(**settings)
    gc.collect()  # what earlier tests have left must not go in the middle of this fit
    with recording(part):
        fit()
    found = part.observe()
    return found if isinstance(found, Unavailable) else memory_report(found)


def memory_of(fit: Callable[[], Any], **settings: Any) -> MemoryReport:
    found = watch(fit, **settings)
    assert isinstance(found, MemoryReport), found
    assert sum(each.nbytes for each in found.categories) == found.peak
    return found


def named(report: MemoryReport) -> dict[str, int]:
    return {each.name: each.nbytes for each in report.categories}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.ones(64 * KiB))

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).relu())


PARAMETERS = (WIDTH * WIDTH + WIDTH + WIDTH + 1) * 4


Keep = Callable[[Any, Any], None]


def batches(count: int, workers: int = 0) -> Iterator[tuple[Any, Any]]:
    data = torch.utils.data.TensorDataset(torch.randn(count * BATCH, WIDTH), torch.randn(count * BATCH, 1))
    return iter(torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers))


def train(count: int = 40, *, keep: Keep = lambda x, loss: None, net: Any = None, workers: int = 0, **backward: Any) -> Any:
    net = Net() if net is None else net
    optimizer, criterion = torch.optim.Adam(net.parameters()), nn.MSELoss()
    for x, y in batches(count, workers):
        loss = criterion(net(x), y)
        loss.backward(**backward)
        optimizer.step()
        optimizer.zero_grad()
        keep(x, loss)
    return net


# --- readings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("milliseconds", "follows"), [(0, True), (2, False)])
def test_phases_are_not_followed_in_a_short_fit_where_a_reading_takes_long(
    milliseconds: int, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_SLOW", SLOW)

    def read() -> int:
        begun = time.thread_time_ns()
        while time.thread_time_ns() - begun < milliseconds * 1_000_000:
            pass
        return 1000

    report = memory_of(lambda: train(12), counter=HeapCounter(read))

    assert bool(report.phases) == follows


# --- growth ---------------------------------------------------------------------------------------------------------------


def test_a_fit_that_ends_soon_after_the_first_look_is_looked_at_once_more() -> None:
    kept: list[Any] = []

    report = memory_of(lambda: train(20, keep=lambda x, _: kept.append(x)))

    assert report.growth is not None
    assert report.growth.holder.endswith("kept")


def grown(fit: Callable[[], Any]) -> Growth:
    found = memory_of(fit).growth
    assert found is not None
    return found


def test_kept_batches_are_named_with_their_size() -> None:
    def run() -> None:
        kept: list[Any] = []
        train(keep=lambda x, _: kept.append(x))

    found = grown(run)

    assert found.per_batch == pytest.approx(INPUT, rel=0.05)
    assert (found.holder, found.is_graph) == ("running run() → kept", False)
    assert found.held >= 20 * INPUT
    assert growth_finding(found).kind == "growth"


class Cyclic:
    """An object that only Python's garbage collector frees, with its tensor."""

    def __init__(self, tensor: Any) -> None:
        self.me, self.tensor = self, tensor


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_the_collection_advised_for_cycles_ends_their_growth(keeps_graph: bool, no_collections: None) -> None:
    def run(collects_every: int = 0) -> MemoryReport:
        numbers = itertools.count(1)

        def keep(x: Any, loss: Any) -> None:
            Cyclic((torch.empty(3 * MiB, dtype=torch.uint8), loss if keeps_graph else None))
            if collects_every and next(numbers) % collects_every == 0:
                gc.collect()

        return memory_of(lambda: train(60, keep=keep))

    found = run().growth
    assert found is not None
    assert found.root == "garbage"
    change = growth_finding(found).change
    every = re.fullmatch(r"call `gc\.collect\(\)` every (\d+) batches; at most 30\.?\d* MiB then waits for it", change)
    assert every, change
    assert run(int(every[1])).growth is None


@pytest.mark.parametrize(("keep", "looks"), [(lambda _: bytearray(INPUT), 0), (lambda x: x, 2)], ids=["bytes", "tensors"])
def test_the_process_is_looked_at_only_where_tensors_explain_the_growth(keep: Callable[[Any], Any], looks: int) -> None:
    """The heap grows by much else, such as plots, and such a look takes as long as many batches."""
    kept: list[Any] = []
    part = MemoryWatch()
    gc.collect()
    with recording(part) as recorder:
        train(keep=lambda x, _: kept.append(keep(x)))
        log = recorder.stop()

    assert [boundary.kind for boundary in log.boundaries].count("disturbed") == looks
    found = part.observe()
    assert isinstance(found, MemoryObservations)
    growth = memory_report(found).growth
    assert growth is not None
    assert growth.per_batch == pytest.approx(INPUT, rel=0.05)
    assert bool(growth.holder) == bool(looks)


def test_losses_that_keep_their_graphs_are_named() -> None:
    def run() -> None:
        losses: list[Any] = []
        train(keep=lambda _, loss: losses.append(loss), retain_graph=True)

    found = grown(run)

    assert found.per_batch == pytest.approx(2 * INPUT, rel=0.2)  # the input, and what relu saved
    assert (found.holder, found.is_graph) == ("running run() → losses", True)
    assert growth_finding(found).kind == "graph"
    assert "`losses.append(loss.item())`" in growth_finding(found).change


def test_what_the_profile_notes_of_each_batch_is_no_growth_of_the_fits() -> None:
    """A loop that reads hundreds of values in each batch has many marks (fits3.md, false growth)."""
    part = MemoryWatch()
    with recording(part) as recorder:
        recorder.look_at(1000)
        train(60, keep=lambda *_: [recorder.mark(recorder.current) for _ in range(1500)] and None)
        nbytes = recorder.nbytes

    found = part.observe()
    assert isinstance(found, MemoryObservations)
    assert nbytes > 60 * 8 * KiB
    assert memory_report(found).growth is None


def test_a_running_sum_of_losses_is_named_although_its_graph_has_no_tensors_left() -> None:
    def run() -> None:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)), nn.Linear(8, 1))  # many nodes, few bytes
        optimizer, total = torch.optim.SGD(net.parameters(), 1e-3), torch.zeros(())
        for _ in range(40):
            loss = net(torch.ones(4, 8)).sum()
            loss.backward()
            optimizer.step()
            total = total + loss

    found = grown(run)

    assert (found.holder, found.is_graph) == ("running run() → total", True)
    assert found.is_sum
    assert "`total += loss.item()`" in growth_finding(found).change


def learner(*callbacks: Any, count: int = 25) -> Any:
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    data = torch.utils.data.TensorDataset(torch.randn(count * BATCH, WIDTH), torch.randn(count * BATCH, 1))
    dls = DataLoaders.from_dsets(data, data, bs=BATCH, num_workers=0, device="cpu")
    return Learner(dls, Net(), loss_func=nn.MSELoss(), cbs=list(callbacks))


def fit(learn: Any, epochs: int) -> None:
    with learn.no_logging():
        learn.fit(epochs, 1e-3)


def test_a_callback_that_keeps_batches_is_named() -> None:
    from fastai.callback.core import Callback

    class Keep(Callback):  # type: ignore[misc]
        def before_fit(self) -> None:
            self.seen: list[Any] = []

        def after_pred(self) -> None:
            if self.training:
                self.seen.append(self.learn.x)

    learn = learner(Keep())
    found = grown(lambda: fit(learn, 2))

    assert found.per_batch == pytest.approx(INPUT, rel=0.1)
    assert found.holder.endswith("learn.keep.seen")


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.block(x).mean(dim=(1, 2))


def _varying_lengths() -> None:
    net = _Attention()
    optimizer = torch.optim.AdamW(net.parameters())
    for n in range(50):
        net(torch.randn(8, 5 + (n * 37) % 40, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _accumulated_gradients() -> None:
    net, parts = Net(), iter(range(1000))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    for x, y in batches(48):
        nn.functional.mse_loss(net(x), y).backward()
        if next(parts) % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def _two_optimizers() -> None:
    first, second = Net(), Net()
    optimizers = [torch.optim.RMSprop(net.parameters()) for net in (first, second)]
    for x, y in batches(30):
        for net, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()


def _numbers_are_kept() -> None:
    losses: list[float] = []
    train(60, keep=lambda _, loss: losses.append(loss.item()))


@pytest.mark.parametrize(
    "run",
    [
        train,
        lambda: train(workers=2),
        lambda: fit(learner(), 3),
        _varying_lengths,
        _accumulated_gradients,
        _two_optimizers,
        _numbers_are_kept,
    ],
    ids=["torch", "workers", "fastai", "varying lengths", "accumulated gradients", "two optimizers", "numbers kept"],
)
def test_a_healthy_fit_does_not_grow(run: Callable[[], Any]) -> None:
    assert memory_of(run).growth is None


# --- what it consists of --------------------------------------------------------------------------------------------------


def test_categories_have_the_sizes_of_the_model_and_its_optimizer() -> None:
    found = named(memory_of(lambda: train(12)))

    assert found["parameters"] == PARAMETERS
    assert found["buffers"] == 64 * KiB * 4
    assert found["optimizer state"] == 2 * PARAMETERS + 4 * 4  # and a step counter for each parameter
    assert found["inputs"] == INPUT
    assert found["before the fit"] > 10 * MiB  # Python and torch themselves


def test_a_fastai_optimizer_has_a_state_and_its_batch_targets() -> None:
    found = named(memory_of(lambda: fit(learner(count=10), 1)))

    assert found["parameters"] == PARAMETERS
    assert found["optimizer state"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert found["inputs"] == pytest.approx(INPUT + BATCH * 4, rel=0.01)


def test_an_older_storage_is_spent_once_it_is_freed_or_owned() -> None:
    gc.collect()
    kept, freed = torch.ones(KiB // 4), torch.ones(KiB // 2, requires_grad=True)
    freed.grad = torch.ones(KiB // 2)
    address = kept.data_ptr()
    weak = weakref.ref(older := OlderStorages())
    newer = torch.ones(KiB)

    assert older.spent("cpu", 1, {newer.data_ptr()}) == 0
    assert older.spent("cpu", 1, {address}) == KiB
    assert older.spent("meta", 1, {address}) == 0
    del freed
    assert older.spent("cpu", 1, ()) == 4 * KiB
    assert older.spent("cpu", 3 * KiB, {address}) == 9 * KiB
    del older
    assert weak() is None


def test_tied_weights_and_views_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("view", self.a.weight.detach()[:10])
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Any) -> Any:
            return self.head(self.b(self.a(x)))

    found = named(memory_of(lambda: train(8, net=Tied())))

    assert found["parameters"] == WIDTH * WIDTH * 4 + (WIDTH + 1) * 4
    assert "buffers" not in found


def test_no_code_of_the_users_runs_and_nothing_is_kept_alive() -> None:
    class Touchy(Net):
        def __getattr__(self, name: str) -> Any:
            if name not in ("body", "head", "scale"):
                raise AssertionError(name)
            return super().__getattr__(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        def __hash__(self) -> int:
            raise AssertionError

        def parameters(self, recurse: bool = True) -> Any:
            return itertools.chain(self.body.parameters(), self.head.parameters())

    seen: list[Any] = []

    def run() -> None:
        train(8, net=Touchy(), keep=lambda x, loss: seen.extend((weakref.ref(x), weakref.ref(loss))))
        assert all(ref() is None for ref in seen)

    assert named(memory_of(run))["parameters"] == PARAMETERS


# --- points ---------------------------------------------------------------------------------------------------------------


def test_points_are_in_order_and_phases_are_named() -> None:
    found = memory_of(lambda: train(20))

    assert [point.at for point in found.points] == sorted(point.at for point in found.points)
    assert {phase_log.WAIT, phase_log.FORWARD, phase_log.BACKWARD, phase_log.STEP} <= {point.phase for point in found.points}
    assert max(point.allocated for point in found.points) <= found.peak
    assert {each.phase for each in found.phases} >= {phase_log.FORWARD, phase_log.BACKWARD}
    assert max(each.peak for each in found.phases) <= found.peak
    assert not any(each.is_exact for each in found.phases)
    assert "malloc keeps no peak" in found.notes[0]


def test_points_are_thinned_out_evenly() -> None:
    history = LevelHistory(Level(0))
    for batch in range(3000):
        history.begin_batch()
        for _ in range(5):
            history.add(batch, phase_log.FORWARD, batch, Level(batch), follows=True)

    kept = sorted({point.batch for point in history.points})
    steps = {after - before for before, after in itertools.pairwise(kept)}
    assert MOST_POINTS / 2 <= len(history.points) <= MOST_POINTS
    assert len(steps) == 1
    assert history.highest == 2999


def test_a_loop_without_a_loader_is_divided_by_its_steps() -> None:
    def run() -> None:
        x, y = next(batches(1))
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for _ in range(20):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert max(point.batch for point in memory_of(run).points) >= 10


# --- other meters ---------------------------------------------------------------------------------------------------------


def test_a_simulated_device_counts_for_itself() -> None:
    with nbguard.simulate("1GiB") as sim:
        found = memory_of(lambda: train(12), counter=SimulatedCounter(sim))
        peak, allocated = sim.max_memory_allocated(), sim.memory_allocated()

    assert (found.source, found.capacity) == ("simulated device", 1024 * MiB)
    assert (found.peak, found.end) == (peak, allocated)
    assert found.start < found.peak
    assert named(found)["parameters"] == (WIDTH * WIDTH + 3 * WIDTH) * 4 - WIDTH * 4 + 512  # in blocks of 512 bytes
    exact = [each for each in found.phases if each.is_exact]
    assert all(each.peak == peak for each in exact)


def test_where_nobody_counts_the_reason_is_given() -> None:
    def on_meta() -> None:
        net = nn.Linear(3, 3, device="meta")
        net(torch.ones(2, 3, device="meta"))

    nothing, meta = watch(lambda: None), watch(on_meta)

    assert isinstance(nothing, Unavailable)
    assert "no module was called" in nothing.reason
    assert isinstance(meta, Unavailable)
    assert "meta" in meta.reason


# --- two recorded batches -------------------------------------------------------------------------------------------------


class Wasteful(Net):
    def forward(self, x: Any) -> Any:
        torch.ones(8 * MiB // 4)  # gone before the forward pass ends
        return super().forward(x)


def test_a_recorded_batch_sees_inside_the_phases_and_names_the_line() -> None:
    found = memory_of(lambda: train(12, net=Wasteful()), deep=True)
    plain = memory_of(lambda: train(12, net=Wasteful()))

    forward = next(each for each in found.phases if each.phase == phase_log.FORWARD)
    unseen = next(each for each in plain.phases if each.phase == phase_log.FORWARD)
    assert forward.is_exact
    assert forward.peak - unseen.peak == pytest.approx(8 * MiB, rel=0.1)
    assert found.peak_phase == phase_log.FORWARD
    assert named(found)["temporaries"] == 8 * MiB
    assert (found.stacks[0].nbytes, found.stacks[0].category) == (8 * MiB, "temporaries")
    assert found.stacks[0].site.startswith("test_memory.py:")
    assert found.stacks[0].site.endswith("in forward()")


@pytest.mark.parametrize("deep", [False, True])
def test_results_do_not_change(deep: bool) -> None:
    def weights(fit: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 1))
        fit(net)
        return [*net.state_dict().values(), torch.get_rng_state()]

    alone = weights(lambda net: train(10, net=net))
    watched = weights(lambda net: memory_of(lambda: train(10, net=net), deep=deep))

    assert all(map(torch.equal, alone, watched))


def test_a_fit_that_fails_while_it_is_recorded_leaves_nothing_behind() -> None:
    count = iter(range(100))

    def stumble(x: Any, loss: Any) -> None:
        if next(count) == 4:
            raise ZeroDivisionError

    part = MemoryWatch(deep=True)
    recorder = Recorder()
    loop = TorchLoop(recorder)
    loop.start()
    part.start(recorder)
    with pytest.raises(ZeroDivisionError):
        train(12, keep=stumble)
    is_recording = bool(_get_current_dispatch_mode_stack())
    part.stop()
    loop.stop()

    assert is_recording
    assert not _get_current_dispatch_mode_stack()
    found = part.observe()
    assert isinstance(found, MemoryObservations)
    assert "ended before a second training batch" in memory_report(found).notes[0]


def test_a_compiled_model_is_not_recorded() -> None:
    def run() -> None:
        train(8, net=torch.compile(Net(), backend="eager"))

    try:
        assert "torch.compile" in memory_of(run, deep=True).notes[0]
    finally:
        torch._dynamo.reset()
