"""A profile as a whole: its options, what it writes, how it says that it ended, and that training does not notice."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fastai.torch_core import set_seed

import nbguard
from nbguard.errors import NbguardError, StoppedAtNaN
from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.profile import FitProfile, forget
from tests.profiler.loops import Fails, items, learner, model, quiet_fit, torch_loader, train
from tests.profiler.recording import generators

MS = 10**6


def profiled(act: Any, *args: Any, **options: Any) -> FitReport:
    with profile_fit(show=False, **options) as profile:
        act(*args)
    return profile.report


def test_a_report_is_written_as_json_as_a_trace_and_to_a_log(tmp_path: Path) -> None:
    written = {
        "json": str(tmp_path / "fit.json"),
        "trace": str(tmp_path / "fit.trace"),
        "logs": (f"csv:{tmp_path / 'fits.csv'}",),
    }

    report = profiled(train, **written)

    data = json.loads((tmp_path / "fit.json").read_text())
    assert data["timing"]["wall"] == report.timing.wall
    assert sum(row["total"] for row in data["timing"]["rows"]) == report.timing.wall
    trace = json.loads((tmp_path / "fit.trace").read_text())
    assert {"forward", "backward"} <= {event["name"] for event in trace["traceEvents"]}
    assert list(csv.reader((tmp_path / "fits.csv").open()))
    assert len(report.files) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"json": "nowhere/fit.json"}, "there is no folder"),
        ({"trace": "nowhere/fit.json"}, "there is no folder"),
        ({"logs": ("nonsense:x",)}, "no log is called 'nonsense'"),
        ({"check_ranks": -1}, "check_ranks=-1 is not valid: give a number of steps, as in  check_ranks=100"),
        ({"check_ranks": True}, "check_ranks=True is not valid"),
        ({"memry": True}, "memry is not an option of a profile; there are: memory,"),
    ],
)
def test_what_cannot_be_is_said_before_the_fit(options: dict[str, Any], says: str) -> None:
    began = False

    with pytest.raises(NbguardError, match=says), profile_fit(**options):
        began = True

    assert not began
    assert not FitProfile.is_any_running()


def test_a_model_is_traced_as_without_a_profile() -> None:
    """`torch.jit.trace`, as called by a TensorBoard logger of Lightning, compares two traces, with each look at a module."""

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.ReLU()])

        def forward(self, x: Any) -> Any:
            return self.parts[1](self.parts[0](x))

    with profile_fit(show=False):
        traced = torch.jit.trace(Parts(), torch.randn(2, 8))

    assert str(traced.graph).count("aten::") == str(torch.jit.trace(Parts(), torch.randn(2, 8)).graph).count("aten::")


def test_of_a_cell_without_a_fit_there_is_one_sentence() -> None:
    nothing = profiled(lambda: sum(range(9)))
    forward = profiled(lambda: model()(torch.ones(2, 6)))

    assert str(nothing).count("\n") == 0
    assert "nothing was trained here" in str(nothing)
    assert "where the time went" in str(forward)


def test_the_second_run_is_compared_with_the_first() -> None:
    forget()
    runs = [profiled(train, compare=True) for _ in range(2)]

    assert [run.comparison is not None for run in runs] == [True, True]
    assert runs[0].comparison is not None
    assert "no earlier run" in runs[0].comparison.sentence
    assert runs[1].comparison is not None
    assert runs[1].comparison.changes[0].name == "step"


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    profile = FitProfile()
    profile.start()
    assert repr(profile) == "nbguard's profile of a fit: it runs"
    with pytest.raises(torch.OutOfMemoryError) as error:
        quiet_fit(learner(Fails("after_pred", 5, torch.OutOfMemoryError)))
    report = profile.finish(error.value)
    assert repr(profile) == "nbguard's profile of a fit: profile.report shows what it found"

    assert (report.ending, report.error, report.timing.batches) == ("out of memory", "OutOfMemoryError", 5)


def breaks(x: Any, _: Any) -> Any:
    return x.sum() * float("nan")


def test_stop_on_nan_ends_a_fit_before_the_step() -> None:
    learn = learner()
    before = [parameter.detach().clone() for parameter in learn.model.parameters()]
    learn.loss_func = breaks

    report = profiled(quiet_fit, learn, stop_on_nan=True)

    assert report.ending == "stopped at NaN"
    assert report.timing.batches == 1
    assert all(torch.equal(one, other) for one, other in zip(before, learn.model.parameters(), strict=True))
    assert report.first[0].startswith("the loss is NaN in batch 1")


def test_stop_on_nan_ends_a_plain_loop_with_an_error_that_says_where() -> None:
    net = model()
    profile = profile_fit(show=False, stop_on_nan=True)

    def loop() -> None:
        with profile:
            for x, _y in torch_loader():
                (net(x).sum() * float("nan")).backward()

    with pytest.raises(StoppedAtNaN, match="batch 1 of epoch 1"):
        loop()
    assert profile._profile.report.ending == "stopped at NaN"


def test_tuning_workers_leaves_no_trace() -> None:
    def run(**options: Any) -> tuple[Any, ...]:
        set_seed(3)
        with profile_fit(show=False, **options) as profile:
            learn = quiet_fit(learner(count=128), 1)
        return [*learn.model.parameters()], generators(), profile.report

    tuned, plain = run(tune_workers=True, memory=True), run()

    assert all(torch.equal(one, other) for one, other in zip(tuned[0], plain[0], strict=True))
    assert tuned[1] == plain[1]
    assert tuned[2].loader.trials
    assert "worker" in tuned[2].loader.tuning


def test_a_simulated_device_counts_the_memory_of_a_fit() -> None:
    from nbguard.training.profiler.instruments.memory_counters import SimulatedCounter

    net = model()
    with nbguard.simulate("1GiB") as simulation:
        profile = FitProfile(counter=SimulatedCounter(simulation))
        profile.start()
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in torch.utils.data.DataLoader(items(), batch_size=8):
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = profile.finish()

    assert isinstance(report.memory, nbguard.training.profiler.analysis.report.MemoryReport)
    assert report.memory.source == "simulated device"
    assert report.memory.capacity == 2**30
