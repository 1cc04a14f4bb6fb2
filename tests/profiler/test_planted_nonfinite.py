"""Values that are not finite, planted in real fits: each is named with its operation and line, and the fit keeps its bits."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from nbguard.errors import StoppedAtNaN
from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.nonfinite import nan_findings
from nbguard.training.profiler.analysis.operations import FailedOperation
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from nbguard.training.profiler.nonfinite.operation_replay import StepReplay
from tests.profiler.recording import generators, recording, seed

AT = 9
"""Item with the value for which an operation is not finite: the second of the third batch."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loop(model: nn.Module, loss_of: Loss, loader: DataLoader[Any], epochs: int = 2) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), []
    for _ in range(epochs):
        for x, y in loader:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


def data(usual: float = 0.5, special: float = 0.5, x: float | None = None) -> DataLoader[Any]:
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.full((24, 2), usual)
    targets[AT] = special
    if x is not None:
        inputs[AT] = x
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


class Watched:
    """A fit with the watch over its values, up to its end or to where the watch stops it."""

    def __init__(self, run: Callable[[], object], *, stops: bool = False) -> None:
        watch, self.message = FiniteWatch(stop_on_nan=stops), ""
        with recording(watch):
            try:
                run()
            except StoppedAtNaN as error:
                self.message = str(error)
            except ValueError as error:
                watch.ended(error)
        first = watch.observe().first
        assert first is not None
        self.first, self.operation = first, first.origin.operation
        (finding,) = nan_findings(watch.observe())
        self.finding = f"{finding.what}: {finding.change}"


def marked_line(code: Any) -> int:
    """Return the number of the line that ends with a mark."""
    lines, start = inspect.getsourcelines(code)
    (line,) = [start + i for i, text in enumerate(lines) if text.rstrip().endswith("# here")]
    return line


def line_of(operation: FailedOperation) -> int:
    found = re.search(r"test_planted_nonfinite\.py:(\d+)", operation.line)
    assert found is not None, operation
    return int(found[1])


def mixed(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return the target, with a graph to the model."""
    return p * 1e-3 * 0 + t


def acos(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = mixed(p, t)
    return torch.acos(value).mean()  # here


def asin(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).asin().sum()  # here


def atanh(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).atanh().sum()  # here


def acosh(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.arccosh(mixed(p, t)).sum()  # here


def erfinv(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.special.erfinv(mixed(p, t)).sum()  # here


def log(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    likelihood = torch.log(mixed(p, t))  # here
    return -likelihood.mean()


def log2(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).log2().mean()  # here


def log1p(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.log1p(mixed(p, t)).mean()  # here


def logit(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.logit(mixed(p, t)).mean()  # here


def sqrt(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(mixed(p, t)).mean()  # here


def rsqrt(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).rsqrt().mean()  # here


def div(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    ratio = (p + 1) / t  # here
    return ratio.square().mean()


def reciprocal(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (mixed(p, t).reciprocal() * p).mean()  # here


def exp(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    kld = -0.5 * torch.sum(
        1 + t - p.pow(2) - mixed(p, t).exp()  # here
    )
    return kld / 8


def exp2(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.exp2(mixed(p, t)).mean()  # here


def expm1(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).expm1().mean()  # here


def sinh(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return mixed(p, t).sinh().mean()  # here


def pow(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # noqa: A001 - the operation's name
    return (mixed(p, t) ** 0.5).mean()  # here


def softmax(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    scores = (p + 1).masked_fill(t > 0.9, -math.inf)
    return torch.softmax(scores, -1).square().mean()  # here


def lgamma(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(mixed(p, t)).mean()  # here


def nested(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    def inner(value: torch.Tensor) -> torch.Tensor:
        return value.log10()  # here

    return sum(inner(row).mean() for row in mixed(p, t)) / 4  # type: ignore[return-value]


FORWARD: list[tuple[Loss, str, float, float]] = [
    (acos, "acos", 0.5, 1.0005),
    (asin, "asin", 0.5, -2.0),
    (atanh, "atanh", 0.5, 1.0),
    (acosh, "acosh", 2.0, 0.5),
    (erfinv, "erfinv", 0.5, 1.0),
    (log, "log", 0.5, 0.0),
    (log2, "log2", 0.5, -1.0),
    (log1p, "log1p", 0.5, -2.0),
    (logit, "logit", 0.5, 1.5),
    (sqrt, "sqrt", 0.5, -0.25),
    (rsqrt, "rsqrt", 0.5, 0.0),
    (div, "div", 0.5, 0.0),
    (reciprocal, "reciprocal", 0.5, 0.0),
    (exp, "exp", 0.5, 231.0),
    (exp2, "exp2", 0.5, 300.0),
    (expm1, "expm1", 0.5, 99.0),
    (sinh, "sinh", 0.5, 120.0),
    (pow, "pow", 0.5, -1.0),
    (softmax, "softmax", 0.5, 1.0),
    (lgamma, "lgamma", 0.5, 0.0),
    (nested, "log10", 0.5, 0.0),
]


@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
@pytest.mark.parametrize(("loss_of", "name", "usual", "special"), FORWARD, ids=[case[0].__name__ for case in FORWARD])
def test_an_operation_of_the_loss_is_named_with_its_line(
    loss_of: Loss, name: str, usual: float, special: float, stops: bool
) -> None:
    seed()
    fit = Watched(lambda: loop(net(), loss_of, data(usual, special)), stops=stops)

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), operation.is_backward) == (name, marked_line(loss_of), False)
    assert fit.first.place.batch == 3
    assert operation.words in (fit.message if stops else fit.finding)
    assert operation.change in fit.finding
    assert "learning rate" not in fit.finding
    if name != "softmax":
        assert (operation.other if name == "div" else operation.value) == pytest.approx(special)


def masked_sqrt(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    d = p - p.detach() + t
    root = d.sqrt()  # here
    return torch.where(d > 0, root, torch.zeros_like(d)).mean()


def bare_sqrt(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    d = (p - p.detach() + t).square()
    return torch.sqrt(d).mean()  # here


def norm(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (((p - p.detach() + t) ** 2).sum(1) ** 0.5).mean()  # here


def masked_log(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    return torch.where(value > 0, torch.log(value), 0.0).mean()  # here


def masked_div(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    ratio = 1 / value  # here
    return torch.where(value == 0, 0.0, ratio).mean()


def masked_exp(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    grown = value.exp()  # here
    return torch.where(value > 50, value, grown).mean()


def acos_at_one(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.acos(p - p.detach() + t).mean()  # here


def power(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (p - p.detach() + t).pow(0.3).mean()  # here


def rsqrt_masked(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    inverse = value.rsqrt()  # here
    return torch.where(value > 0, inverse, value).mean()


def log1p_masked(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    return torch.where(value > -1, value.log1p(), value).mean()  # here


def normalize(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    value = p - p.detach() + t
    return (value.square().sum(1) / value.square().sum(1).sqrt().clamp_min(1e-9)).mean()  # here


BACKWARD: list[tuple[Loss, str, float]] = [
    (masked_sqrt, "sqrt", 0.0),
    (bare_sqrt, "sqrt", 0.0),
    (norm, "pow", 0.0),
    (masked_log, "log", 0.0),
    (masked_div, "div", 0.0),
    (masked_exp, "exp", 99.0),
    (acos_at_one, "acos", 1.0),
    (power, "pow", 0.0),
    (rsqrt_masked, "rsqrt", 0.0),
    (log1p_masked, "log1p", -1.0),
    (normalize, "sqrt", 0.0),
]


@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
@pytest.mark.parametrize(("loss_of", "name", "special"), BACKWARD, ids=[case[0].__name__ for case in BACKWARD])
def test_an_operation_of_the_backward_pass_is_named_with_its_line(
    loss_of: Loss, name: str, special: float, stops: bool
) -> None:
    seed()
    fit = Watched(lambda: loop(net(), loss_of, data(0.5, special)), stops=stops)

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), operation.is_backward) == (name, marked_line(loss_of), True)
    assert (fit.first.of, fit.first.place.batch) == ("gradient", 3)
    assert operation.words in (fit.message if stops else fit.finding)
    assert operation.change in fit.finding
    assert "learning rate" not in fit.finding
    assert "clip" not in fit.finding


class Gate(nn.Module):
    """Divides by what a batch has none of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x[:, :1] - x[:, :1].detach() + (x[:, :1].detach() > -99).float()
        return x / scale  # here


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(3, 3), Gate(), nn.Linear(3, 2)
        nn.init.eye_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(self.body(x)))  # type: ignore[no-any-return]


class _Built(nn.Sequential):
    """A model that is called on tensors without data first, as Keras does to know its shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta else super().forward(x)


def test_a_model_that_was_called_on_meta_tensors_first_is_watched() -> None:
    def run() -> None:
        model = _Built(*net())
        model(torch.empty(4, 3, device="meta"))
        loop(model, log, data(special=-9.0))

    watched = Watched(run)

    assert watched.operation is not None
    assert watched.operation.name == "log"


def test_an_operation_of_a_module_is_named_with_the_module() -> None:
    seed()
    fit = Watched(lambda: loop(Root(), nn.functional.mse_loss, data(x=-100.0)))

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), operation.module) == ("div", marked_line(Gate), "gate")
    assert operation.other == 0.0
    assert "`gate`, Gate" in fit.finding


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of", ["input", "target"])
def test_items_that_are_not_finite_are_named(of: str, value: float) -> None:
    seed()
    loader = data(x=value) if of == "input" else data(special=value)
    fit = Watched(lambda: loop(net(), nn.functional.mse_loss, loader))

    origin = fit.first.origin
    assert (origin.kind, origin.items, fit.first.place.batch) == (of, (1,), 3)
    assert "item 1 of the batch" in fit.finding


def learner(model: nn.Module, loss_of: Any, *callbacks: Any, special: float = 0.5) -> Any:
    from fastai.vision.all import DataLoaders, Learner

    return Learner(DataLoaders(data(special=special), data()), model, loss_func=loss_of, cbs=list(callbacks))


def callbacks() -> list[Any]:
    from fastai.vision.all import Callback

    class DividesInput(Callback):  # type: ignore[misc]
        def before_batch(self) -> None:
            (x,) = self.xb
            self.learn.xb = (x / (x - x),)  # here

    class LogsPrediction(Callback):  # type: ignore[misc]
        def after_pred(self) -> None:
            if self.training:
                self.learn.pred = (self.pred * 0).log()  # here

    class RootsPrediction(Callback):  # type: ignore[misc]
        def after_pred(self) -> None:
            self.learn.pred = (self.pred.abs() * -1 - 1).sqrt()  # here

    class ScalesPrediction(Callback):  # type: ignore[misc]
        def after_pred(self) -> None:
            if self.training and self.iter >= 2:
                self.learn.pred = self.pred * math.nan  # here

    return [DividesInput, LogsPrediction, RootsPrediction, ScalesPrediction]


def fitted(learn: Any, epochs: int) -> Callable[[], None]:
    def fit() -> None:
        with learn.no_bar(), learn.no_logging():
            learn.fit(epochs)

    return fit


def checks_for_nan(ending: type[Exception]) -> Any:
    """Return a callback, as many write one, that ends a fit before the backward pass of a loss that is NaN."""
    from fastai.vision.all import Callback

    class NaNDetector(Callback):  # type: ignore[misc]
        def after_loss(self) -> None:
            if self.loss.isnan().any():
                raise ending("the loss is NaN")

    return NaNDetector()


@pytest.mark.parametrize(("number", "name"), [(0, "div"), (1, "log"), (2, "sqrt"), (3, "mul")])
def test_an_operation_of_a_callback_is_named_with_it(number: int, name: str) -> None:
    seed()
    callback = callbacks()[number]
    operation = Watched(fitted(learner(net(), nn.functional.mse_loss, callback()), 1)).operation

    assert operation is not None
    assert (operation.name, line_of(operation)) == (name, marked_line(callback))
    assert callback.__name__ in operation.line


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_loss_that_a_callback_checks_before_its_backward_pass_is_looked_at(is_cancelled: bool) -> None:
    from fastai.vision.all import CancelFitException

    seed()
    check = checks_for_nan(CancelFitException if is_cancelled else ValueError)
    fit = Watched(fitted(learner(net(), nn.functional.mse_loss, callbacks()[3](), check), 1))

    assert fit.operation is not None
    assert (fit.first.of, fit.first.place.batch, fit.first.place.epoch, fit.operation.name) == ("loss", 3, 1, "mul")


@pytest.mark.parametrize("leave", ["break", "raise ValueError"])
def test_a_loss_that_a_loop_checks_and_leaves_is_looked_at(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name at the top level of a cell, or in the frames of an error. A loss that was computed before the fit is not."""
    names = vars(sys.modules["__main__"])
    earlier = torch.ones((), requires_grad=True) * math.nan
    here = {"earlier": earlier, "loss": None, "batches": data(special=0.0), "model": net(), "mse_loss": nn.functional.mse_loss}
    for name, value in here.items():
        monkeypatch.setitem(names, name, value)
    loop = f"""
for x, y in batches:
    loss = mse_loss(model(x) / y.amin(), y)
    if not loss.isfinite():
        {leave}
    loss.backward()
"""
    watch, error = FiniteWatch(), None
    with recording(watch):
        try:
            exec(compile(loop, __file__, "exec"), names if leave == "break" else here)
        except ValueError as raised:
            error = raised
        watch.ended(error)

    first = watch.observe().first
    assert first is not None
    assert first.origin.operation is not None
    assert (first.of, first.place.batch, first.origin.operation.name) == ("loss", 3, "div")


@pytest.mark.parametrize(("loss_of", "name"), [(acos, "acos"), (masked_sqrt, "sqrt"), (log, "log")])
def test_an_operation_of_a_learners_loss_is_named(loss_of: Loss, name: str) -> None:
    seed()
    fit = Watched(fitted(learner(net(), loss_of, special=2.0 if name == "acos" else 0.0), 2))

    assert fit.operation is not None
    assert (fit.operation.name, line_of(fit.operation)) == (name, marked_line(loss_of))
    assert fit.first.place.batch == 3


def big_linear(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(p + 100, torch.full((2, 2), 3e4)).float().mean()  # here


def big_matmul(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    scores = (p + 300) @ (p + 300).T  # here
    return scores.float().mean()


def big_exp(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (p.half() + 12).exp().float().mean()  # here


def big_square(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    grown = (p.half() + 300) * (p.half() + 300)  # here
    return grown.float().mean()


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    ("loss_of", "name"), [(big_linear, "linear"), (big_matmul, "matmul"), (big_exp, "exp"), (big_square, "mul")]
)
def test_an_operation_that_overflows_in_float16_is_named(loss_of: Loss, name: str, is_scaled: bool) -> None:
    seed()
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=is_scaled)
    with profile_fit(show=False) as profile:
        for _ in range(2):
            for x, y in data():
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    operation = profile._observations.finite.first.origin.operation
    assert (operation.name, line_of(operation), operation.dtype) == (name, marked_line(loss_of), "float16")
    assert "float16" in profile.report.first[0]
    if is_scaled and scaler.get_scale() == 65536 / 2**12:
        assert "every one of 12 steps was skipped" in profile.report.first[0]


@pytest.mark.parametrize(("loss_of", "name"), [(bare_sqrt, "sqrt"), (acos_at_one, "acos")])
def test_steps_that_a_scaler_skips_one_after_the_other_are_laid_to_the_operation(loss_of: Loss, name: str) -> None:
    seed()
    model, special = net(), 1.0 if name == "acos" else 0.0
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    with profile_fit(show=False) as profile:
        for _ in range(3):
            for x, y in data(special, special):
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    scaled = profile._observations.finite.course.scaled
    assert scaled.operation.name == name
    assert line_of(scaled.operation) == marked_line(loss_of)
    first = profile.report.first[0]
    assert "every one of 18 steps was skipped" in first
    assert scaled.operation.words in first
    assert "nothing stands out" not in first
    assert "bfloat16" not in first


class Everything(nn.Module):
    """Layers with generators, statistics, states and in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.memory, self.attention = nn.GRU(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        h, _ = self.memory(self.inputs(x)[:, None])
        h = h + self.attention(h, h, h)[0]
        h[:, 0] += torch.randn(8) * 0.01
        return self.head(self.norm(h)[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
@pytest.mark.parametrize(("loss_of", "special"), [(acos, 2.0), (masked_sqrt, 0.0), (nn.functional.mse_loss, math.nan)])
def test_the_fit_keeps_its_bits(loss_of: Loss, special: float, stops: bool) -> None:
    def run(is_profiled: bool) -> Any:
        seed()
        model, counts, losses = Everything(), [], []

        def counted(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            counts.append(1)
            return loss_of(p, t)

        loader = data(0.5, special if not stops else 0.5)
        if is_profiled:
            with profile_fit(show=False, stop_on_nan=stops):
                losses = loop(model, counted, loader)
        else:
            losses = loop(model, counted, loader)
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        return [repr(each) for each in losses], [t.tolist().__repr__() for t in tensors], model.calls, counts, generators()

    assert run(True) == run(False)


@pytest.mark.parametrize("loss_of", [acos, masked_sqrt])
def test_nothing_of_the_step_is_kept(monkeypatch: pytest.MonkeyPatch, loss_of: Loss) -> None:
    kept: list[weakref.ref[Any]] = []

    class Noted(StepReplay):
        def _keep(self, pattern: Any, result: Any) -> None:
            super()._keep(pattern, result)
            kept.extend(weakref.ref(tensor) for tensor in self._slots.values())

    monkeypatch.setattr("nbguard.training.profiler.nonfinite.operation_search.StepReplay", Noted)
    gc.disable()
    try:
        Watched(lambda: loop(net(), loss_of, data(0.5, 2.0 if loss_of is acos else 0.0)))
        assert kept
        assert [reference for reference in kept if reference() is not None] == []
    finally:
        gc.enable()


def test_an_operation_that_no_other_step_repeats_is_known() -> None:
    def run(steps: int) -> Callable[[], None]:
        def fit() -> None:
            model = net().eval()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(steps):
                share = model(torch.ones(4, 3)).abs() * (0 if step == 2 else 1)
                loss = -share.log10().mean()  # here
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return fit

    for steps in (3, 6):
        operation = Watched(run(steps)).operation
        assert operation is not None
        assert (operation.name, operation.value) == ("log10", 0.0)
        assert line_of(operation) == marked_line(run)


class SafeLog(torch.autograd.Function):
    """Safe in the forward pass only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(1e-6).log()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / ctx.saved_tensors[0]  # here


def own_function(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return SafeLog.apply(p - p.detach() + t).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
def test_the_line_in_a_functions_own_backward_is_named(stops: bool) -> None:
    seed()
    apply = torch.autograd.Function.__dict__["apply"]
    fit = Watched(lambda: loop(net(), own_function, data(special=0.0)), stops=stops)

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), operation.other) == ("div", marked_line(SafeLog), 0.0)
    assert "SafeLog.backward" in fit.finding
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_a_function_that_calls_a_backward_pass_is_not_run_again() -> None:
    class Nested(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            Nested.calls += 1
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                x.mul(2.0).backward(gradient)
            assert x.grad is not None
            return x.grad

    seed()
    Watched(lambda: loop(net(), lambda p, t: bare_sqrt(Nested.apply(p), t), data(special=0.0)))

    assert Nested.calls == 12


def gradient_callbacks() -> list[Any]:
    from fastai.vision.all import Callback

    class DividesLoss(Callback):  # type: ignore[misc]
        def after_loss(self) -> None:
            self.learn.loss_grad = self.loss_grad / (self.yb[0].min() + 0 * self.loss_grad)  # here

    class DividesGradients(Callback):  # type: ignore[misc]
        def before_step(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad = parameter.grad / self.yb[0].min()  # here

    class RootsInPlace(Callback):  # type: ignore[misc]
        def before_step(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad.mul_(self.yb[0].min() / self.yb[0].min())  # here

    return [DividesLoss, DividesGradients, RootsInPlace]


@pytest.mark.parametrize(("number", "stops"), [(number, stops) for number in range(3) for stops in (False, True)])
def test_a_callback_that_breaks_the_loss_or_the_gradients_is_named(number: int, stops: bool) -> None:
    seed()
    callback = gradient_callbacks()[number]
    fit = Watched(fitted(learner(net(), nn.functional.mse_loss, callback(), special=0.0), 1), stops=stops)

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), fit.first.place.batch) == ("div", marked_line(callback), 3)
    assert callback.__name__ in operation.line


def edits_gradients(model: nn.Module, at: int) -> None:
    x = torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(at + 1):
        share = torch.full((), float(step != at))
        optimizer.zero_grad()
        model(x).mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(share)  # here
        optimizer.step()


def fails_last(model: nn.Module, at: int) -> None:
    x = torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(at + 1):
        share = torch.full((4, 2), float(step != at))
        outputs = model(x)
        optimizer.zero_grad()
        (outputs - outputs.detach() + share).sqrt().mean().backward()  # here
        optimizer.step()


def branches(model: nn.Module, at: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(at + 1):
        outputs = model(torch.ones(4, 3))
        loss = outputs.square().mean()
        if step == at:
            loss = loss + (outputs - outputs.detach()).sqrt().mean()  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("run", "name", "stops"),
    [
        (edits_gradients, "div", True),
        (edits_gradients, "div", False),
        (fails_last, "sqrt", True),
        (fails_last, "sqrt", False),
        (branches, "sqrt", True),
    ],
)
def test_a_gradient_that_fails_in_the_last_step_is_known(run: Callable[..., None], name: str, stops: bool) -> None:
    seed()
    operation = Watched(lambda: run(net().eval(), 5), stops=stops).operation

    assert operation is not None
    assert (operation.name, line_of(operation)) == (name, marked_line(run))


def test_a_step_that_does_otherwise_than_those_before_leads_to_the_option_that_knows_it() -> None:
    seed()
    fit = Watched(lambda: branches(net().eval(), 5))

    assert fit.operation is None
    assert "--stop-on-nan" in fit.finding


def test_only_the_first_step_is_recorded_and_nothing_of_it_is_held() -> None:
    modes: list[int] = []
    held: list[weakref.ref[Any]] = []

    def counted(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        modes.append(len(_get_current_function_mode_stack()))
        assert all(reference() is None for reference in held[:-2])
        held.extend((weakref.ref(p), weakref.ref(t)))
        return nn.functional.mse_loss(p, t)

    watch = FiniteWatch()
    gc.disable()
    try:
        with recording(watch):
            loop(net(), counted, data())
    finally:
        gc.enable()

    assert modes == [1] + [0] * 11


def test_the_backward_pass_of_a_compiled_model_is_named() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().sum(1, keepdim=True).sqrt().expand(-1, 2)  # here

    seed()
    model = Compiled()
    try:
        fit = Watched(lambda: loop(torch.compile(model, backend="eager"), nn.functional.mse_loss, data(x=0.0)))  # type: ignore[arg-type]
    finally:
        torch._dynamo.reset()

    operation = fit.operation
    assert operation is not None
    assert (operation.name, line_of(operation), operation.is_backward) == ("sqrt", marked_line(Compiled), True)


def test_no_more_is_computed_again_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, now = [0], [0.0]
    original = StepReplay._keep

    def keep(self: StepReplay, pattern: Any, result: Any) -> None:
        computed[0] += 1
        now[0] += 0.3
        original(self, pattern, result)

    def clock() -> float:
        return now[0]

    monkeypatch.setattr(StepReplay, "_keep", keep)
    monkeypatch.setattr("nbguard.training.profiler.nonfinite.operation_replay.time.monotonic", clock)
    seed()
    fit = Watched(lambda: loop(net(), masked_sqrt, data(0.5, 0.0)))

    assert fit.operation is None
    assert fit.first.origin.kind == "gradient"
    assert 0 < computed[0] <= 4  # one more than fit in: a second, all tries together


@pytest.mark.parametrize("fails", [False, True])
def test_modes_of_torch_are_as_the_user_left_them(fails: bool) -> None:
    seen: list[int] = []

    def fit() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number, (x, y) in enumerate(data(0.5, 2.0)):
            with torch.device("cpu"):
                loss = acos(model(x), y)
            with torch.device("cpu"):
                optimizer.zero_grad()
                loss.backward()
            if fails and number == 3:
                raise KeyError(number)
            optimizer.step()
            seen.append(len(_get_current_function_mode_stack()))

    with contextlib.suppress(KeyError):
        operation = Watched(fit).operation
        assert operation is not None
        assert operation.name == "acos"
    assert set(seen) == {0}
    assert _get_current_function_mode_stack() == []


def test_a_step_that_cannot_be_recorded_is_a_step_all_the_same() -> None:
    """Only gradients that add up, or that code changes, are looked at after each backward pass: not those of a usual loop."""
    model = nn.Linear(2, 1)
    data = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 2)
    watch = FiniteWatch()
    with torch.overrides.BaseTorchFunctionMode(), recording(watch):  # under another mode no step is recorded
        loop(model, nn.functional.mse_loss, data)
        assert not watch._search.changes_gradients
