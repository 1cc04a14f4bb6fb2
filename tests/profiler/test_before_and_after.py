"""Only what a fit itself did is blamed on it: not what was there before, and on no holder whose growth does not explain it."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastai.basics import Callback, nn

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitFinding, FitReport, MemoryReport
from nbguard.training.profiler.instruments import growth_watch as growth
from nbguard.training.profiler.instruments import timeline
from tests.kernels import Zygote
from tests.profiler.loops import BATCH, learner, quiet_fit, torch_loader, train

KiB = 1024


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The names of a script, which stand for those of a notebook; new ones go after the test."""
    namespace = sys.modules["__main__"].__dict__
    before = set(namespace)
    yield namespace
    for name in set(namespace) - before:
        del namespace[name]


@pytest.fixture(autouse=True)
def large_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests before this one have left so much that a look at the heap may take longer than a fit is held up for."""
    monkeypatch.setattr(growth, "_TOO_SLOW", float("inf"))


def losses_with_graphs(count: int) -> list[Any]:
    net = nn.Linear(4, 1)
    return [net(torch.ones(2, 4)).sum() for _ in range(count)]


def profiled(fit: Any, *args: Any, **kw: Any) -> FitReport:
    with profile_fit(show=False) as profile:
        fit(*args, **kw)
    return profile.report


def graphs(report: FitReport) -> list[str]:
    return [finding.what for finding in report.findings if finding.kind == "graph"]


def test_graphs_of_an_earlier_cell_are_not_blamed_on_a_later_fit(names: dict[str, Any]) -> None:
    names["planted_history"] = losses_with_graphs(100)

    plain, fastai = profiled(train, 5), profiled(quiet_fit, learner(), 5)

    for report in (plain, fastai):
        assert report.timing.batches == 40
        assert graphs(report) == []
        assert not any("planted_history" in sentence for sentence in report.first)


def test_of_a_list_that_was_there_before_only_the_graphs_of_this_fit_count(names: dict[str, Any]) -> None:
    names["planted_history"] = kept = losses_with_graphs(100)

    report = profiled(train, 1, loader=torch_loader(count=8 * 14), each=kept.append)

    assert graphs(report) == ["`planted_history` keeps 14 autograd graphs"]
    assert "planted_history" in report.first[0]


def test_text_that_a_callback_keeps_is_not_blamed_on_fastais_losses() -> None:
    log: list[str] = []

    class Keep(Callback):  # type: ignore[misc]
        def after_batch(self) -> None:
            log.append(f"{1.5:f}" * 4000)  # 32 KiB that no tensor holds

    report = profiled(quiet_fit, learner(Keep(), count=240), 2)

    assert isinstance(report.memory, MemoryReport)
    assert report.memory.growth is not None
    assert report.memory.growth.per_batch > 20 * KiB
    assert report.memory.growth.holder == ""
    assert not any("recorder" in sentence for sentence in report.first)
    (growth,) = [finding for finding in report.findings if finding.kind == "growth"]
    assert growth.what.endswith("its holder is not known")


RUNNING_SUM = """
import cProfile, pathlib, nbguard, torch
from torch import nn
from nbguard.frontend.notebook.profile import profile_fit
from torch.utils.data import DataLoader, TensorDataset

ours = str(pathlib.Path(nbguard.__file__).parent)
for batches in (30, 120):
    profiler, net = cProfile.Profile(builtins=False), nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    total = torch.zeros(())
    with profile_fit(show=False), profiler:
        for x, y in DataLoader(TensorDataset(torch.randn(8 * batches, 6), torch.arange(8 * batches) % 2), batch_size=8):
            loss = nn.functional.cross_entropy(net(x), y)
            total = total + loss
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    print(sum(each.callcount for each in profiler.getstats() if getattr(each.code, "co_filename", "").startswith(ours)))
"""


@pytest.mark.slow
def test_a_running_sum_under_a_name_costs_a_profile_the_same_for_each_batch(fastai_zygote: Zygote) -> None:
    """Calls of nbguard's functions, not time: a graph that grows under a name is looked at twice, and never as a whole.

    In a process of its own, whose heap is small: `gc.get_referrers` goes through all of it.
    """
    printed, errors = fastai_zygote.run(RUNNING_SUM, {}, 300, frozen=True)
    assert len(printed.split()) == 2, errors
    few, many = map(int, printed.split())

    assert 1000 < few < many < 4.5 * few


def test_a_state_that_is_carried_on_is_named_and_not_the_loss_that_is_computed_from_it(names: dict[str, Any]) -> None:
    """As of an RNN without `h.detach()`: the loss is bound anew in each batch. foreign.md 13, q05."""
    size = 256  # its growth is far above what the tests beside this one do to the memory of the process
    cell, head = nn.RNNCell(6, size), nn.Linear(size, 2)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 1e-4)
    names["planted_h"] = torch.zeros(BATCH, size)

    def fit() -> None:
        for x, y in torch_loader(count=8 * 60):
            names["planted_h"] = cell(x, names["planted_h"])
            names["planted_loss"] = nn.functional.cross_entropy(head(names["planted_h"]), y)
            gradients = torch.autograd.grad(names["planted_loss"], [*cell.parameters()], retain_graph=True)
            names["planted_loss"].backward(retain_graph=True)
            assert gradients
            optimizer.zero_grad()

    report = profiled(fit)

    (finding,) = [finding for finding in report.findings if finding.kind == "graph"]
    assert "`planted_h` keeps the autograd graph of every batch" in finding.what
    assert "`planted_h = planted_h.detach()`" in finding.change
    assert "loss" not in finding.change


@pytest.mark.slow
def test_the_statistics_of_activations_are_named_and_the_advice_cures_it(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug case 34: many small tensors, of which the values are less than half of what each takes on the heap.

    All of its batches are read, as on a quick machine, also those after the looks: what a look frees is not the fit's.
    """
    monkeypatch.setattr(timeline, "_FIRST", (1000, 1000))
    from fastai.callback.hook import ActivationStats

    def fit(*callbacks: Any) -> list[FitFinding]:
        gc.collect()  # what earlier tests have left must not go in the middle of this fit
        layers = [module for _ in range(20) for module in (nn.Linear(6, 6), nn.ReLU())]
        learn = names["planted_learn"] = learner(*callbacks, count=480)
        learn.model = nn.Sequential(*layers, nn.Linear(6, 2))
        return [finding for finding in profiled(quiet_fit, learn, 2).findings if finding.kind in ("graph", "growth")]

    (finding,) = fit(ActivationStats(with_hist=True))

    assert "`planted_learn.activation_stats.stats`" in finding.what
    assert len(names["planted_learn"].activation_stats.stats) == 120
    assert fit(eval(finding.change.split("`")[1], {"ActivationStats": ActivationStats})) == []
    assert fit() == []


class Agent:
    """An object that keeps losses, in ways of its own."""

    def __init__(self) -> None:
        self.buffer: list[Any] = []
        self.by_step: dict[str, Any] = {}
        self.total: Any = 0

    def append(self, loss: Any) -> None:
        self.buffer.append(loss)


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (list, "kept.append(loss)"),
        (dict, "kept[step] = loss"),
        (set, "kept.add(loss)"),
        (deque, "kept.append(loss)"),
        (tuple, "kept += (loss,)"),
        (lambda: defaultdict(list), "kept['train'].append(loss)"),
        (Agent, "kept.append(loss)"),
        (Agent, "kept.by_step[f'step {step}'] = loss"),
        (Agent, "kept.total = kept.total + loss"),
        (lambda: torch.zeros(1), "kept = torch.cat((kept, loss[None]))"),
    ],
)
def test_the_line_that_is_advised_runs_and_keeps_no_graph(names: dict[str, Any], make: Any, keep: str) -> None:
    """Bug case 17's kind: `agent.append(…)` of what is no list."""
    names["planted"], keep = make(), keep.replace("kept", "planted")

    def fit() -> None:
        net = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(30):
            loss = net(torch.ones(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            names.update(loss=loss, step=step, torch=torch)
            exec(keep, names)
        for name in ("loss", "step"):
            del names[name]

    (finding,) = [finding for finding in profiled(fit).findings if finding.kind == "graph"]
    line = finding.change.split("`")[1]
    loss = nn.Linear(8, 1)(torch.ones(1, 8)).sum()
    space = {"planted": make(), "loss": loss, "value": loss[None], "key": 0, "torch": torch}
    before = contents(space)
    exec(line, space)
    assert before != contents(space)
    assert "grad_fn" not in contents(space)


def contents(space: dict[str, Any]) -> str:
    planted = space["planted"]
    return repr(vars(planted) if type(planted) is Agent else planted)
