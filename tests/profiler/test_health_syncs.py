"""Hidden synchronisations in real loops: the line, how often, and nothing else changes."""

from __future__ import annotations

import inspect
import statistics
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbguard.training.profiler.checks.syncs import SyncSite, SyncWatch, sync_findings
from tests.profiler.recording import recording, seed

HERE = "test_health_syncs.py"


def loader(batches: int = 10) -> DataLoader[Any]:
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return batches * 4

        def __getitem__(self, index: int) -> Any:
            label = torch.tensor(index)
            return torch.ones(4) * int(label), label.item()  # the loader's own, in host memory

    return DataLoader(Items(), batch_size=4)


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def setup() -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 1)
    return model, torch.optim.Adam(model.parameters())


def loop(watch: SyncWatch) -> None:
    model, optimizer = setup()
    with recording(watch):
        for x, _ in loader():
            loss = model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()


def sites(watch: SyncWatch) -> list[SyncSite]:
    return list(watch.observe().sites)


def test_a_line_that_reads_the_loss_is_named_with_its_count() -> None:
    watch = SyncWatch()
    loop(watch)

    (site,) = sites(watch)
    assert site.where == f"{HERE}:{line_of(loop, 'loss.item()')} in loop()"
    assert (site.methods, site.calls, site.batches, site.waited) == (("item",), 10, 10, None)
    assert watch.observe().batches == 10
    (found,) = sync_findings(watch.observe())
    assert (found.kind, found.severity, found.time) == ("sync", "note", None)
    assert "10 times in 10 training batches (1 per batch)" in found.evidence


def test_a_line_that_has_a_library_read_is_named_not_the_librarys() -> None:
    def logs(loss: Any) -> None:
        statistics.fmean([loss])

    watch, (model, optimizer) = SyncWatch(), setup()
    with recording(watch):
        for x, _ in loader():
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            logs(loss.detach())

    assert [(site.where, site.own) for site in sites(watch)] == [(f"{HERE}:{line_of(logs, 'fmean')} in logs()", "")]


LIBRARY = """
def fit(model, loader, optimizer):
    for x, _ in loader:
        model(x).mean().backward()
        optimizer.step()

def forward(model, x):
    return model.layer(x) * float(x.sum())
"""


def test_what_a_librarys_loop_reads_is_its_own() -> None:
    """The user's line only begins the fit: it can do nothing about it."""
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, f"{sysconfig.get_path('purelib')}/trainer.py", "exec"), library)
    model, _ = setup()
    whole = type("Whole", (nn.Module,), {"forward": library["forward"]})()
    whole.layer = model
    watch = SyncWatch()
    with recording(watch):
        library["fit"](whole, loader(), torch.optim.SGD(whole.parameters(), 0.1))

    assert [site.own for site in sites(watch)] == ["forward"]
    assert sync_findings(watch.observe()) == ()


METRIC = """
def forward(metric, predicted, target):
    return float((predicted - target).sum())
"""


@pytest.mark.parametrize("is_inside", [False, True], ids=["called in the loop", "called in a forward of the user's"])
def test_what_a_librarys_model_reads_is_its_own(is_inside: bool) -> None:
    """The user's line only calls the model, as one of Hugging Face's with its attention mask, and reads nothing itself."""
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, f"{sysconfig.get_path('purelib')}/models.py", "exec"), library)
    whole: Any = type("Whole", (nn.Module,), {"forward": library["forward"]})()
    whole.layer, optimizer = setup()

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = whole

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    model, watch = Mine() if is_inside else whole, SyncWatch()
    with recording(watch):
        for x, _ in loader():
            model(x).mean().backward()
            optimizer.step()

    assert [site.own for site in sites(watch)] == ["forward"]
    assert sync_findings(watch.observe()) == ()


def test_what_a_librarys_metric_reads_is_of_the_line_that_calls_it() -> None:
    library: dict[str, Any] = {}
    exec(compile(METRIC, f"{sysconfig.get_path('purelib')}/metrics.py", "exec"), library)
    metric: Any = type("Metric", (nn.Module,), {"forward": library["forward"]})()
    watch, (model, optimizer) = SyncWatch(), setup()
    with recording(watch):
        for x, _ in loader():
            out = model(x)
            out.mean().backward()
            optimizer.step()
            metric(out.detach(), x)  # may be left out

    (site,) = sites(watch)
    assert site.where.startswith(
        f"{HERE}:{line_of(test_what_a_librarys_metric_reads_is_of_the_line_that_calls_it, '# may be left out')} "
    )
    assert site.own == ""


def test_a_warning_of_a_read_stands_at_the_users_line() -> None:  # seeds3.md, "Too long or unclear"
    model, _ = setup()
    watch = SyncWatch()
    with recording(watch), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for x, _y in loader():
            loss = model(x).mean()
            float(loss)  # warns
            loss.backward()

    said = {(Path(each.filename).name, each.lineno) for each in seen if "requires_grad=True to a scalar" in str(each.message)}
    assert said == {(HERE, line_of(test_a_warning_of_a_read_stands_at_the_users_line, "# warns"))}


def test_an_error_of_a_read_is_the_users() -> None:
    model, _ = setup()

    def fit() -> None:
        for x, _y in loader():
            model(x).mean().backward()
            torch.ones(4).item()

    with recording(SyncWatch()), pytest.raises(RuntimeError, match="a Tensor with 4 elements"):
        fit()


def test_everything_is_put_back() -> None:
    before = {
        name: (name in vars(torch.Tensor), getattr(torch.Tensor, name)) for name in dir(torch.Tensor) if name != "__doc__"
    }
    loop(SyncWatch())
    assert {name: (name in vars(torch.Tensor), getattr(torch.Tensor, name)) for name in before} == before
    assert not hasattr(torch.cuda.synchronize, "__wrapped__")


def test_every_way_to_read_a_value_counts_once() -> None:
    def ways(x: torch.Tensor) -> None:
        bool(x)
        float(x)
        int(x)
        [1, 2, 3][x.long()]
        x.tolist()
        x.cpu().numpy()
        x.nonzero()
        f"{x:.2f}"
        x.cpu()
        x.view(1).unique()
        x.view(1).masked_select(x > 0)
        torch.Tensor.equal(x, x)
        x.allclose(x)
        x.to("cpu")  # it is there: on a device it would not be

    watch, (model, _) = SyncWatch(), setup()
    with recording(watch):
        for _, _ in loader(5):
            x = model(torch.ones(4)).sum()
            x.backward()
            ways(x.detach())

    found = {site.where.split(":")[1].split(" ")[0]: (site.methods, site.calls) for site in sites(watch)}
    first = line_of(ways, "bool(x)")
    names = ["__bool__", "__float__", "__int__", "__index__", "tolist", "cpu", "nonzero", "item", "cpu"]
    names += ["unique", "masked_select", "equal", "allclose"]
    assert found == {str(first + i): ((name,), 5) for i, name in enumerate(names)}


def test_an_evaluation_inside_a_training_batch_is_not_counted_and_does_not_end_it() -> None:
    watch, (model, optimizer) = SyncWatch(), setup()
    with recording(watch):
        for x, _ in loader(6):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for y, _ in loader(2):
                    model(y).mean().item()
            after = model(x).mean().item()  # counted
    assert after is not None
    (site,) = sites(watch)
    assert (site.calls, watch.observe().batches) == (6, 6)


def test_batches_that_no_loader_gives_are_counted_by_backward_passes() -> None:
    watch, (model, optimizer) = SyncWatch(), setup()
    with recording(watch):
        model(torch.ones(4)).mean().item()  # before
        for _ in range(7):
            loss = model(torch.ones(4)).mean()
            loss.backward()
            optimizer.step()
            loss.item()
    (site,) = sites(watch)
    assert (site.calls, site.batches, watch.observe().batches) == (7, 7, 7)


def test_subclasses_and_modes_see_one_call() -> None:
    from fastai.torch_core import TensorBase
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    watch, (model, _) = SyncWatch(), setup()
    with recording(watch), Mode():
        for x, _ in loader(4):
            loss = model(TensorBase(x)).mean()
            loss.backward()
            loss.item()
            nn.Parameter(torch.ones(1)).item()
    assert [site.calls for site in sites(watch)] == [4, 4]


def test_torch_compile_breaks_no_more_often() -> None:
    def graphs(*parts: Any) -> tuple[int, int]:
        seed()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

        class Reads(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = net(x.to(torch.float64).to("cpu", torch.float32))
                return y * 2 if y.sum().item() > 0 else y

        model = torch.compile(Reads(), backend="aot_eager")
        with recording(*parts):
            for x, _ in loader(5):
                loss = model(x).mean()
                loss.backward()
                loss.item()
        counters = torch._dynamo.utils.counters
        return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]

    watch = SyncWatch()
    assert graphs(watch) == graphs()
    by_calls = sorted((site.calls, site.methods) for site in sites(watch) if site.batches > 1)
    assert by_calls == [(5, ("item",)), (5, ("item",))]


def test_fastais_own_reads_go_by_the_callbacks_name_and_are_no_finding() -> None:
    from fastai.vision.all import DataLoaders, Learner

    x = torch.randn(64, 4)
    items = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    learner = Learner(DataLoaders(items, items), nn.Linear(4, 1), loss_func=nn.functional.mse_loss)
    watch = SyncWatch()
    with recording(watch), learner.no_logging():
        learner.fit(2)

    (site,) = sites(watch)
    assert (site.own, site.calls, watch.observe().batches) == ("Recorder", 16, 16)
    assert sync_findings(watch.observe()) == ()


def test_a_users_callback_is_named_by_its_line() -> None:
    from fastai.vision.all import Callback, DataLoaders, Learner

    class Mine(Callback):
        def after_batch(self) -> None:
            self.learn.loss.item()

    x = torch.randn(64, 4)
    items = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    learner = Learner(DataLoaders(items, items), nn.Linear(4, 1), loss_func=nn.functional.mse_loss, cbs=Mine())
    watch = SyncWatch()
    with recording(watch), learner.no_bar(), learner.no_logging():
        learner.fit(1)

    (site,) = (site for site in sites(watch) if not site.own)
    assert site.where == f"{HERE}:{line_of(Mine, 'loss.item()')} in after_batch()"
    assert site.calls == 8
