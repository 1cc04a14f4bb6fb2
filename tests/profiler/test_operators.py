"""`--ops`: the operators of real fits, with their modules and lines; what the user's code does stays as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import nbguard
from nbguard.render.text import blocks_text
from nbguard.training.profiler.analysis.operators import OperatorFacts, OperatorTime, operator_table
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.render.fit import operator_blocks

_BATCHES = 10


class Net(torch.nn.Module):
    """A model in which one line takes nearly all of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 2)
        self.register_buffer("large", torch.randn(700, 700))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.body(x)
        x = x + (self.large @ self.large).mean()  # line of the product
        return self.head(x)


LINE = next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# line of the product")
)


def fit(batches: int = _BATCHES, **options: Any) -> tuple[FitReport, Net]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(4 * batches, 8), torch.randint(2, (4 * batches,)))
    with nbguard.profile_fit(**options) as profile:
        for x, y in torch.utils.data.DataLoader(data, batch_size=4):
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile.report, net


def test_the_operator_that_takes_most_is_named_with_its_line_and_the_fit_is_the_same(tmp_path: Path) -> None:
    trace, level = tmp_path / "trace.json", os.environ.get("KINETO_LOG_LEVEL")
    report, net = fit(ops=True, trace=str(trace))

    table = report.operators
    assert table is not None
    assert (table.batches, table.note, table.device) == (4, "", 0)
    assert 0 < table.cpu < report.timing.wall
    first = table.rows[0]
    assert (first.name, first.module, first.is_backward, first.calls) == ("aten::mm", "Net", False, 4)
    assert first.site == f"test_operators.py:{LINE} in forward()"
    assert first.cpu > table.cpu / 2
    assert f"test_operators.py:{LINE}" in blocks_text(report.blocks(whole=False))

    events = json.loads(trace.read_text())["traceEvents"]
    batches = [each for each in events if each.get("name") in [f"batch {number}" for number in range(5, 9)]]
    products = [each for each in events if each.get("name") in ("aten::matmul", "aten::mm") and each["dur"] > 0]
    for batch in batches:
        assert any(batch["ts"] <= each["ts"] <= batch["ts"] + batch["dur"] for each in products)
        assert "disturbed" in batch["args"]

    plain, alike = fit()
    assert plain.operators is None
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), alike.parameters(), strict=True))
    assert not torch.autograd._profiler_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert os.environ.get("KINETO_LOG_LEVEL") == level


def test_the_modules_of_a_learner_are_named_forward_and_backward() -> None:
    import fastai.callback.progress  # noqa: F401 - gives Learners their no_bar
    from fastai.basics import DataLoaders, Learner

    data = [(torch.randn(8), torch.ones(1)) for _ in range(2 * _BATCHES)]
    loaders = DataLoaders.from_dsets(data, data[:2], bs=2, num_workers=0, device=torch.device("cpu"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))
    learn = Learner(loaders, model, loss_func=torch.nn.MSELoss())
    with nbguard.profile_fit(ops=True) as profile, learn.no_bar(), learn.no_logging():
        learn.fit(1)

    facts = profile.observations.operators
    assert facts is not None
    products = {(each.module, each.is_backward) for each in facts.times if each.name in ("aten::addmm", "aten::mm")}
    assert {("1 (Linear)", False), ("1 (Linear)", True)} <= products
    assert all("learn.fit" not in each.module and "fastai" not in each.site for each in facts.times)


@pytest.mark.parametrize("why", ["too few", "another profiler"])
def test_what_cannot_be_recorded_says_why(why: str) -> None:
    if why == "too few":
        table = fit(batches=2, ops=True)[0].operators
    else:
        with torch.autograd.profiler.profile(use_kineto=False):
            table = fit(ops=True)[0].operators
    assert table is not None
    assert table.rows == ()
    assert why in table.note
    assert why in blocks_text(operator_blocks(table))


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    net = Net()

    def fails() -> None:
        for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4)):  # type: ignore[arg-type]
            net(x).sum().backward()
            if number == 6:
                raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"), nbguard.profile_fit(ops=True) as profile:
        fails()

    assert profile.report.operators is not None
    assert profile.report.operators.batches == 3
    assert not torch.autograd._profiler_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_the_gpus_time_ranks_where_there_is_one() -> None:
    slow_host = OperatorTime(name="aten::to", calls=4, cpu=900, device=4)
    slow_gpu = OperatorTime(name="aten::conv", module="0 (Conv2d)", calls=4, cpu=10, device=396)
    facts = OperatorFacts(times=(slow_host, slow_gpu), batches=4)

    table = operator_table(facts)
    assert table is not None
    assert (table.rows, table.cpu, table.device) == ((slow_gpu, slow_host), 910, 400)
    shown = blocks_text(operator_blocks(table))
    assert "on the GPU" in shown
    assert "99%" in shown
    assert operator_table(None) is None
