"""NaN and infinity in real fits: found in the right batch, with the layer that made them, and training stays as it was."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbguard.errors import StoppedAtNaN
from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.nonfinite import NotFinite, nan_findings
from nbguard.training.profiler.nonfinite.device_losses import LossHistory
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from tests.profiler.recording import generators, recording, seed


class Faulty(nn.Module):
    """Returns infinity at one call, and counts its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls, self.seen = at, 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x * math.inf if self.calls == self.at else x


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(8), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x).relu())


def net(layer: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), Block(layer or nn.Identity()), nn.Linear(8, 1))


def data(bad: int | None = None, batches: int = 6) -> DataLoader[Any]:
    x = torch.randn(batches * 4, 4, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        x[bad] = math.nan
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train(model: nn.Module, loader: DataLoader[Any], epochs: int = 1, loss: Callable[..., Any] | None = None) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(epochs):
        for x, y in loader:
            out = (loss or nn.functional.mse_loss)(model(x), y)
            optimizer.zero_grad()
            out.backward()
            optimizer.step()
            losses.append(out.item())
    return losses


def first_of(watch: FiniteWatch) -> NotFinite:
    first = watch.observe().first
    assert first is not None
    return first


def test_a_layer_that_returns_infinity_is_named_with_its_batch() -> None:
    watch, model = FiniteWatch(), net(Faulty(9))
    with recording(watch):
        train(model, data(), epochs=2)

    first = first_of(watch)
    assert (first.place.batch, first.place.epoch) == (3, 2)
    assert (first.origin.kind, first.origin.name, first.origin.type) == ("layer", "2.inner", "Faulty")
    (found,) = nan_findings(watch.observe())
    assert (found.kind, found.severity) == ("nan", "problem")
    assert "batch 3 of epoch 2" in found.what
    assert "`2.inner` (Faulty)" in found.evidence


def test_it_is_found_in_its_batch_also_where_other_parts_do_not_look() -> None:
    watch, model = FiniteWatch(), net(Faulty(47))
    with recording(watch):
        train(model, data(batches=40), epochs=2)

    first = first_of(watch)
    assert (first.place.batch, first.place.epoch) == (7, 2)
    assert (first.origin.kind, first.origin.name) == ("layer", "2.inner")


class Mask(nn.Module):
    """Minus infinity on purpose, as masks of attention have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.arange(x.shape[1]) > 1, -math.inf)


class Attention(nn.Module):
    """Its mask is gone after a softmax: a module of its own, or a function."""

    def __init__(self, softmax: Callable[..., Any]) -> None:
        super().__init__()
        self.mask, self.softmax = Mask(), softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = self.softmax(self.mask(x))
        return x * weights


@pytest.mark.parametrize("make_softmax", [partial(nn.Softmax, 1), lambda: partial(torch.softmax, dim=1)])
@pytest.mark.parametrize("loss", [None, lambda output, y: (output - y).mean() * math.inf])
def test_a_mask_that_others_take_in_their_stride_is_not_to_blame(make_softmax: Callable[[], Any], loss: Any) -> None:
    watch = FiniteWatch()
    model = nn.Sequential(
        nn.Linear(4, 8), Attention(make_softmax()), Block(Faulty(3) if loss is None else nn.Identity()), nn.Linear(8, 1)
    )
    with recording(watch):
        train(model, data(), loss=loss)

    origin = first_of(watch).origin
    assert (origin.kind, origin.name) == (("layer", "2.inner") if loss is None else ("loss", ""))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_bad_value_that_comes_around_a_layer_is_still_the_first(value: float) -> None:
    """A branch beside the one that is broken, and a layer that would hide it, are healthy."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken, self.beside = Faulty(1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.broken(x) * value + self.beside(x)

    watch = FiniteWatch()
    with recording(watch):
        train(nn.Sequential(Branches(), nn.Linear(4, 1)), data())

    assert (first_of(watch).origin.kind, first_of(watch).origin.name) == ("layer", "0.broken")


@dataclass
class Output:
    """As models of transformers return."""

    loss: Any
    hidden: torch.Tensor


class Named(nn.Module):
    """Takes its arguments by name, and gives an object with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = nn.Linear(4, 1), Faulty(3)

    def forward(self, x: Any = None, labels: Any = None) -> Output:
        hidden = self.inner(x=self.body(x))
        return Output(nn.functional.mse_loss(hidden, labels), hidden)


@pytest.mark.parametrize("positional", [True, False])
def test_a_model_may_be_called_by_name_and_return_an_object(positional: bool) -> None:
    watch, model = FiniteWatch(), Named()
    with recording(watch):
        for x, y in data():
            output = model(x, labels=y) if positional else model(labels=y, x=x)
            output.loss.backward()

    assert first_of(watch).place.batch == 3
    assert (first_of(watch).origin.kind, first_of(watch).origin.name) == ("layer", "inner")


def test_a_layer_may_return_an_object() -> None:
    class Wraps(Faulty):
        def forward(self, x: Any) -> Any:
            return Output(None, super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wraps, self.last = nn.Linear(4, 4), Wraps(3), nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.last(self.wraps(self.first(x)).hidden)

    watch = FiniteWatch()
    with recording(watch):
        train(Outer(), data())

    assert (first_of(watch).origin.kind, first_of(watch).origin.name) == ("layer", "wraps")


def test_the_search_leaves_the_model_and_the_generators_as_they_were() -> None:
    def run(*parts: Any) -> tuple[Any, ...]:
        seed()
        model = net(Faulty(3))
        with recording(*parts):
            losses = train(model, data())
        return (
            [repr(each) for each in losses],
            [repr(t) for t in model.state_dict().values()],
            model[2].inner.seen,
            generators(),
        )

    watch = FiniteWatch()
    assert run(watch) == run()
    assert first_of(watch).origin.name == "2.inner"


def test_a_batch_that_is_not_finite_itself_is_told_from_a_layer() -> None:
    watch = FiniteWatch()
    with recording(watch):
        train(net(), data(bad=9))

    assert first_of(watch).place.batch == 3
    assert first_of(watch).value == "NaN"
    assert first_of(watch).origin.kind == "input"


def test_a_logarithm_of_zero_in_the_loss_is_the_losss() -> None:
    watch = FiniteWatch()
    with recording(watch):
        train(net(), data(), loss=lambda out, y: (out * 0).log().mean())

    assert (first_of(watch).place.batch, first_of(watch).origin.kind) == (1, "loss")


def test_code_of_a_forward_is_told_from_the_layers_in_it() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.before(x) / torch.zeros(8))

    watch = FiniteWatch()
    with recording(watch):
        train(Root(), data())

    assert (first_of(watch).origin.kind, first_of(watch).origin.type) == ("code", "Root")


def test_an_infinite_gradient_is_named_by_the_last_layer_that_has_it() -> None:
    watch, model = FiniteWatch(), net()
    model[2].register_full_backward_hook(lambda *_: (torch.full((4, 8), math.inf),))
    with recording(watch):
        train(model, data())

    assert (first_of(watch).of, first_of(watch).value) == ("gradient", "NaN")
    assert (first_of(watch).place.batch, first_of(watch).origin.name) == (1, "0.bias")


@pytest.mark.parametrize(
    ("dtype", "has_scaler", "is_found"), [("float16", False, True), ("bfloat16", False, False), ("float16", True, False)]
)
def test_a_gradient_beyond_float16_is_known_as_that(dtype: str, has_scaler: bool, is_found: bool) -> None:
    """Each of the two remedies is tried, too."""
    seed()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.0), torch.amp.GradScaler("cpu", enabled=has_scaler)
    with profile_fit(show=False) as profile:
        for _ in range(20):
            with torch.autocast("cpu", getattr(torch, dtype)):
                out = model(torch.randn(16, 8))
            loss = (out.float() * 1e5).square().mean()  # finite, as float32 is; its gradient becomes the output's type
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    first = profile.report.first[0]
    assert ("the gradient is NaN in backward pass 1" in first and "in float16" in first) == is_found
    assert ("`dtype=torch.bfloat16`, which has the range of float32; or a `torch.amp.GradScaler()`" in first) == is_found
    assert any(finding.kind == "nan" for finding in profile.report.findings) == is_found


def test_a_step_that_broke_the_parameters_is_named() -> None:
    watch, model = FiniteWatch(), net()
    with recording(watch):
        watch._next_look = math.inf  # no look at gradients in between
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for count, (x, y) in enumerate(data()):
            nn.functional.mse_loss(model(x), y).backward()
            if count == 2:
                model[2].norm.weight.grad.fill_(math.inf)
            optimizer.step()
            optimizer.zero_grad()

    assert first_of(watch).place.batch == 4
    assert (first_of(watch).origin.kind, first_of(watch).origin.name) == ("step", "2.norm.weight")


def test_weights_that_were_not_finite_before_the_first_step_are_no_steps_work() -> None:
    """Of a checkpoint, or of a fit before this one in the notebook, which has broken the same model."""
    model = net()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    watch = FiniteWatch()
    with recording(watch):
        train(model, data())

    first = first_of(watch)
    (finding,) = nan_findings(watch.observe())

    assert (first.origin.kind, first.place.batch) == ("weights", 1)
    assert f"`{first.origin.name}`" in finding.what
    assert "step before" not in finding.evidence


def test_a_plain_loop_stops_before_the_step() -> None:
    watch, model = FiniteWatch(stop_on_nan=True), net(Faulty(3))
    with (
        pytest.raises(StoppedAtNaN, match=r"loss is .* in batch 3 of epoch 1, made by `mul` .*: first in `2.inner` \(Faulty\)"),
        recording(watch),
    ):
        train(model, data())

    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert first_of(watch).has_stopped
    assert "stopped" in nan_findings(watch.observe())[0].what


def test_a_fastai_fit_stops_as_if_cancelled() -> None:
    from fastai.vision.all import Callback, DataLoaders, Learner

    class Notes(Callback):
        def after_cancel_fit(self) -> None:
            cancelled.append(self.learn.train_iter)

    cancelled: list[int] = []
    watch, model = FiniteWatch(stop_on_nan=True), net(Faulty(3))
    learner = Learner(DataLoaders(data(), data()), model, loss_func=nn.functional.mse_loss, cbs=Notes())
    with recording(watch), learner.no_bar(), learner.no_logging():
        learner.fit(2)

    assert cancelled == [2]
    assert first_of(watch).place.batch == 3
    assert first_of(watch).origin.name == "2.inner"
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_learning_rate_search_that_diverges_is_no_problem() -> None:
    from fastai.vision.all import DataLoaders, Learner

    watch = FiniteWatch(stop_on_nan=True)
    loader = data(batches=40)
    model = nn.Sequential(nn.Linear(4, 8), Faulty(25), nn.Linear(8, 1))
    learner = Learner(DataLoaders(loader, loader), model, loss_func=nn.functional.mse_loss)
    with recording(watch), learner.no_bar(), learner.no_logging():
        learner.lr_find(num_it=40, show_plot=False)

    (found,) = nan_findings(watch.observe())
    assert found.severity == "note"


def test_a_fit_after_a_search_that_diverged_is_looked_at() -> None:
    from fastai.vision.all import DataLoaders, Learner

    watch, loader = FiniteWatch(), data(batches=40)
    model = nn.Sequential(nn.Linear(4, 8), Faulty(25), Faulty(31), nn.Linear(8, 1))
    learner = Learner(DataLoaders(loader, loader), model, loss_func=nn.functional.mse_loss)
    with recording(watch), learner.no_bar(), learner.no_logging():
        learner.lr_find(num_it=27, show_plot=False)
        model[1].at, model[2].calls = 0, 0
        learner.fit(1)

    (found,) = nan_findings(watch.observe())
    assert (found.severity, first_of(watch).place.batch, first_of(watch).origin.name) == ("problem", 31, "2")


def test_a_finite_fit_has_no_finding_and_every_loss_was_seen() -> None:
    watch = FiniteWatch()
    with recording(watch):
        train(net(), data(), epochs=3)

    assert nan_findings(watch.observe()) == ()
    assert watch.observe().losses == 18
    assert watch.observe().gradients >= 1


def test_a_compiled_model_is_searched_like_any_other() -> None:
    torch._dynamo.reset()
    watch, model = FiniteWatch(), net(Faulty(3))
    with recording(watch):
        train(torch.compile(model, backend="eager"), data())

    assert first_of(watch).place.batch == 3
    assert (first_of(watch).origin.kind, first_of(watch).origin.name) == ("layer", "2.inner")


def test_buffers_that_the_backward_pass_needs_are_not_touched() -> None:
    """In evaluation mode BatchNorm's statistics are saved for the backward pass: writing to them would fail it."""
    watch, model = FiniteWatch(), net(Faulty(2)).eval()
    with recording(watch):
        train(model, data())
    assert first_of(watch).origin.name == "2.inner"


def test_autocast_is_as_it_was() -> None:
    class Overflows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, torch.full((8, 8), 30000.0))  # finite in float32

    def run(watch: FiniteWatch) -> NotFinite:
        model = net(Overflows())
        with recording(watch), contextlib.suppress(StoppedAtNaN):
            for x, _ in data():
                with torch.autocast("cpu", torch.float16):
                    loss = model(x + 1).float().mean()
                loss.backward()
        return first_of(watch)

    for stops in (False, True):
        first = run(FiniteWatch(stop_on_nan=stops))
        assert (first.origin.kind, first.origin.name) == ("layer", "2.inner")
        assert first.origin.operation is not None
        assert (first.origin.operation.name, first.origin.operation.dtype) == ("linear", "float16")


def test_nothing_of_the_users_is_kept() -> None:
    from nbguard.training.profiler.checks.amp import AmpWatch
    from nbguard.training.profiler.checks.optimizers import OptimizerWatch
    from nbguard.training.profiler.checks.switches import SwitchWatch
    from nbguard.training.profiler.checks.syncs import SyncWatch

    def run() -> list[weakref.ref[Any]]:
        model, loader = net(), data()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu")
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [weakref.ref(each) for each in (model, x, loss, optimizer, scaler, loader, next(model.parameters()))]

    for stops in (False, True):
        with recording(FiniteWatch(stop_on_nan=stops), AmpWatch(), OptimizerWatch(), SyncWatch(), SwitchWatch()):
            refs = run()
            gc.collect()
            assert [ref() for ref in refs] == [None] * len(refs)


def ahead(loader: Any, count: int) -> Any:
    """Yield the batches of a loader, `count` of which are fetched before the first is handed out, as Trainers do."""
    iterator, waiting = iter(loader), []
    for batch in iterator:
        waiting.append(batch)
        if len(waiting) > count:
            yield waiting.pop(0)
    yield from waiting


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("at", "place"), [(3, (3, 1)), (10, (10, 1)), (11, (1, 2)), (19, (9, 2)), (20, (10, 2))])
def test_batches_are_counted_right_where_they_are_fetched_ahead(count: int, at: int, place: tuple[int, int]) -> None:
    watch, model = FiniteWatch(), net(Faulty(at))
    loader = data(batches=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(watch):
        for _ in range(2):
            for x, y in ahead(loader, count):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    first = first_of(watch)
    assert (first.place.batch, first.place.epoch) == place


def test_batches_are_counted_right_under_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    watch, model = FiniteWatch(), net(Faulty(24))
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data(batches=30))
    with recording(watch):
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    assert first_of(watch).place.batch == 24


class OfALibrary(torch.Tensor):
    """A tensor of a class whose every use is counted."""

    uses = 0

    @classmethod
    def __torch_function__(cls, *args: Any, **kw: Any) -> Any:
        cls.uses += 1
        return super().__torch_function__(*args, **kw)


@pytest.mark.parametrize("kind", [torch.Tensor, OfALibrary])
@pytest.mark.parametrize(
    ("value", "is_usual"), [(0.5, True), (-9e3, True), (2e4, False), (math.nan, False), (math.inf, False), (-math.inf, False)]
)
def test_a_usual_loss_is_noted_without_a_call_of_its_class(kind: type[Any], value: float, is_usual: bool) -> None:
    history, loss = LossHistory(torch), torch.tensor(value, requires_grad=True).as_subclass(kind)
    OfALibrary.uses = 0

    assert not history.is_usual(loss)  # the first one of a fit is looked at closely
    history.note(0.25, ())
    assert history.is_usual(loss) is is_usual

    assert OfALibrary.uses == 0
    assert history.count == is_usual
    assert history.last == (value if is_usual else 0.25)
    history.reset()
    assert history.last is None
    assert not history.is_usual(loss)


def test_several_values_are_no_usual_loss() -> None:
    history = LossHistory(torch)
    history.note(0.25, ())

    with pytest.raises(RuntimeError):
        history.is_usual(torch.ones(2))
    with pytest.raises(AttributeError):
        history.is_usual([torch.ones(())])
    assert history.count == 0
