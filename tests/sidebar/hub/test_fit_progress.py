"""A real fastai fit, watched from another thread."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastai.callback.schedule import Learner  # with fit_one_cycle, fine_tune and lr_find
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader

from nbguard.frontend.sidebar.hub.tick_source import FitProgress, _outwards
from nbguard.frontend.sidebar.protocol.state import FitTick

BATCHES, ROWS = 6, 8
Act = Callable[[], object]


def nothing() -> None:
    """Stand for a model or data set in which nobody looks."""


class Forward(torch.nn.Module):
    """Does something in the middle of a batch."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act()
        return x


class Rows:
    """A data set that does something whenever an item is asked for."""

    def __init__(self, act: Act) -> None:
        self.act = act

    def __len__(self) -> int:
        return BATCHES * ROWS

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.act()
        return torch.full((4,), n / ROWS), torch.tensor(n % 2)


def learner(forward: Act = nothing, item: Act = nothing) -> Any:
    loaders = [DataLoader(Rows(item), bs=ROWS, num_workers=0) for _ in range(2)]
    dls = DataLoaders(*loaders, device=torch.device("cpu"))
    learn = Learner(dls, torch.nn.Sequential(Forward(forward), torch.nn.Linear(4, 2)), loss_func=torch.nn.CrossEntropyLoss())
    learn.remove_cbs([learn.progress])
    learn.logger = lambda *_: None
    return learn


class Looks:
    """Reads in a thread of its own, as the hub's sampler does, and waits for it."""

    def __init__(self, progress: FitProgress, *peaks: int) -> None:
        self.seen: list[FitTick] = []
        self._progress, self._peaks = progress, list(peaks)

    def __call__(self) -> None:
        run_elsewhere(self._read)

    def _read(self) -> None:
        found = self._progress.read(self._peaks.pop(0)) if self._peaks else self._progress.read()
        assert found is not None
        self.seen.append(found)


class Watch:
    """Reads over and over in a thread of its own, whatever the fit is at."""

    def __init__(self) -> None:
        self.seen: list[FitTick] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        progress = FitProgress()
        while not self._stop.wait(0.001):
            if (found := progress.read()) is not None:
                self.seen.append(found)

    def __enter__(self) -> list[FitTick]:
        self._thread.start()
        return self.seen

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run_here(act: Act) -> None:
    act()


def run_elsewhere(act: Act) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [run_here, run_elsewhere], ids=["main thread", "another thread"])
def test_a_fit_is_followed_from_its_first_batch_to_its_last(run: Callable[[Act], None]) -> None:
    progress = FitProgress()
    looks = Looks(progress)
    learn = learner(looks)
    progress.names = {id(learn): "runs['a']"}

    assert progress.read() is None
    run(lambda: learn.fit_one_cycle(2, 1e-3))
    assert progress.read() is None

    assert {(tick.label, tick.call, tick.epochs, tick.batches) for tick in looks.seen} == {("runs['a']", "fit_one_cycle", 2, 6)}
    batches = [(epoch, training, batch) for epoch in (1, 2) for training in (True, False) for batch in range(1, BATCHES + 1)]
    assert [(tick.epoch, tick.is_training, tick.batch) for tick in looks.seen] == batches
    losses = [float(loss) for loss in learn.recorder.losses]
    assert [tick.loss for tick in looks.seen if tick.is_training] == pytest.approx([None, *losses[:-1]])


@pytest.mark.parametrize(
    ("call", "in_fit"),
    [
        (lambda learn: learn.fit(1), True),
        (lambda learn: learn.fine_tune(1), True),
        (lambda learn: learn.lr_find(num_it=8, show_plot=False), True),
        (lambda learn: learn.validate(), False),
        (lambda learn: learn.get_preds(), False),
    ],
    ids=["fit", "fine_tune", "lr_find", "validate", "get_preds"],
)
def test_what_was_called_is_named(call: Callable[[Any], object], in_fit: bool, request: pytest.FixtureRequest) -> None:
    looks = Looks(FitProgress())
    call(learner(looks))

    assert {tick.call for tick in looks.seen} == {request.node.callspec.id}
    assert {tick.label for tick in looks.seen} == {"a Learner"}
    assert {tick.epoch is not None for tick in looks.seen} == {in_fit}
    assert any(tick.is_training for tick in looks.seen) == in_fit


def test_waiting_for_data_is_a_share_of_the_looks_at_each_fit() -> None:
    looks = Looks(FitProgress())
    learn = learner(forward=looks, item=looks)

    for _ in range(2):
        looks.seen.clear()
        learn.fit(1)
        assert {tick.waiting for tick in looks.seen[:19]} == {None}
        assert len(looks.seen) == 2 * BATCHES * (ROWS + 1)
        assert looks.seen[-1].waiting == round(ROWS / (ROWS + 1), 2)


def test_the_peak_is_told_only_if_the_fit_has_raised_it() -> None:
    looks = Looks(FitProgress(), 100, 100, 300, 300)
    learner(looks).fit(1)

    assert [tick.peak for tick in looks.seen[:5]] == [None, None, 300, 300, None]


def test_nothing_is_kept_alive() -> None:
    """A dict of all threads' frames that knows the frame it is in keeps the last batch until the next collection."""
    learn, batches = learner(lambda: time.sleep(0.002)), list[weakref.ref[torch.Tensor]]()
    learn.model.register_forward_pre_hook(lambda _, args: batches.append(weakref.ref(args[0])))
    gc.disable()
    try:
        with Watch() as seen:
            learn.fit(3)
        kept = [number for number, batch in enumerate(batches) if batch() is not None]
    finally:
        gc.enable()

    assert seen
    assert not kept
    gone = weakref.ref(learn)
    del learn
    gc.collect()
    assert gone() is None


def test_an_error_ends_what_is_seen() -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    learn, progress = learner(broken), FitProgress()
    with pytest.raises(RuntimeError):
        learn.fit(1)
    assert progress.read() is None


@pytest.mark.parametrize(
    "losses",
    [
        lambda: ["no number"],
        lambda: (),
        lambda: [torch.tensor([1.0, 2.0])],
        lambda: [torch.tensor(float("nan"))],
        lambda: [object()],
    ],
)
def test_a_recorder_that_holds_something_else_says_nothing(losses: Callable[[], object]) -> None:
    looks = Looks(FitProgress())

    def look() -> None:
        learn.recorder.losses, kept = losses(), learn.recorder.losses
        looks()
        learn.recorder.losses = kept

    learn = learner(look)
    learn.fit(1)

    assert {tick.loss for tick in looks.seen} == {None}


def test_a_loss_of_fastais_own_tensor_type_is_read() -> None:
    from fastai.torch_core import TensorBase

    looks = Looks(FitProgress())
    learn = learner(looks)
    learn.loss_func = lambda found, wanted: TensorBase(torch.nn.functional.cross_entropy(found, wanted))
    learn.fit(1)

    assert type(learn.recorder.losses[-1]) is TensorBase
    assert looks.seen[-1].loss == pytest.approx(float(learn.recorder.losses[-1]))


def test_the_way_out_ends_at_the_cell() -> None:
    found: dict[str, Any] = {"__name__": "__main__", "outwards": _outwards, "here": sys._getframe}
    exec("def inner():\n    return [frame.f_code.co_name for frame in outwards(here())]\nnames = inner()", found)
    assert found["names"] == ["inner", "<module>"]
    elsewhere = {**found, "__name__": "imported"}
    exec("def inner():\n    return [frame.f_code.co_name for frame in outwards(here())]\nnames = inner()", elsewhere)
    assert elsewhere["names"][:2] == ["inner", "<module>"]
    assert len(elsewhere["names"]) > 3
