"""What is on a model and is no part of it: told by its path, and let go of by a line that leaves the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import nbguard

pytestmark = pytest.mark.usefixtures("frozen_libraries")


class Keeping(nn.Module):
    """A layer that keeps its outputs, the last with its graph and all in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 100)
        self.register_buffer("seen", torch.ones(1000))
        self.table = torch.ones(5000)  # needed by whoever put it there
        self.outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, and keep it."""
        self.x = self.layer(x)
        self.outputs.append(self.x * 2)
        return self.x.relu()


def _row(names: dict[str, Any]) -> Any:
    return next(row for row in nbguard.report(names).devices[0].holders if row.label == "model")


def test_a_model_tells_what_of_it_is_not_the_model_and_its_line_leaves_the_model() -> None:
    names: dict[str, Any] = {"model": nn.Sequential(Keeping())}
    names["model"](torch.ones(1000, 100)).sum().backward()
    names["model"](torch.ones(1000, 100))
    gc.collect()
    state = {name: value.clone() for name, value in names["model"].state_dict().items()}
    row = _row(names)
    (finding,) = (finding for finding in nbguard.report(names).findings if finding.kind == "rest")

    assert {"parameters", "buffers", "gradients"} <= {word.strip(":,") for word in row.what.split()}
    assert "model[0].outputs" in row.what
    assert "model[0].x" in row.what
    assert finding.command == "model[0].x = None; model[0].outputs.clear()"
    exec(finding.command, names)
    gc.collect()
    after = _row(names)

    assert row.retained - after.retained == finding.advice.frees
    assert after.retained == 2 * (100 * 100 + 100) * 4 + 4000 + 20_000  # parameters with gradients, buffer, table
    assert "model[0].table" in after.what
    assert not [finding.command for finding in nbguard.report(names).findings if finding.kind == "rest" and finding.command]
    assert all(torch.equal(value, state[name]) for name, value in names["model"].state_dict().items())
    assert names["model"](torch.ones(2, 100)).shape == (2, 100)


def test_a_model_that_is_all_model_has_no_such_line() -> None:
    names: dict[str, Any] = {"model": nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))}
    names["model"](torch.ones(8, 100)).sum().backward()

    assert _row(names).what == "Sequential"
    assert not [finding for finding in nbguard.report(names).findings if finding.kind == "rest"]


class Ranks(nn.Module):
    """A metric that keeps all predictions until its reset, as torchmetrics' do."""

    def __init__(self) -> None:
        super().__init__()
        self.preds: list[torch.Tensor] = []

    def update(self, preds: torch.Tensor) -> None:
        """Collect predictions."""
        self.preds.append(preds)

    def compute(self) -> torch.Tensor:
        """Return their mean."""
        return torch.cat(self.preds).mean()

    def reset(self) -> None:
        """Forget them."""
        self.preds = []


class Tracker(nn.ModuleList):
    """The metrics of all epochs, whose `reset` is of the latest, as torchmetrics' `MetricTracker` has it."""

    def update(self, preds: torch.Tensor) -> None:
        """Start another epoch with predictions."""
        self.append(Ranks())
        self[-1].update(preds)

    def compute(self) -> torch.Tensor:
        """Return the latest epoch's value."""
        return self[-1].compute()

    def reset(self) -> None:
        """Forget the latest epoch's predictions."""
        self[-1].reset()

    def reset_all(self) -> None:
        """Forget all."""
        for ranks in self:
            ranks.reset()


def _allocated(names: dict[str, Any]) -> int:
    gc.collect()
    return nbguard.report(names).devices[0].allocated


@pytest.mark.parametrize("is_part", [False, True], ids=["alone", "of a model"])
def test_what_a_metric_has_collected_goes_by_its_own_reset(is_part: bool) -> None:
    names: dict[str, Any] = {"model": Ranks()}
    for _ in range(3):
        names["model"].update(torch.ones(100_000))
    if is_part:
        names["model"] = nn.ModuleDict({"layer": nn.Linear(10, 10), "ranks": names["model"]})
    before = _allocated(names)
    (finding,) = (finding for finding in nbguard.report(names).findings if finding.kind == "rest")

    assert finding.command == ("model['ranks'].reset()" if is_part else "model.reset()")
    assert finding.advice.frees == 3 * 400_000
    exec(finding.command, names)

    assert before - _allocated(names) == 3 * 400_000
    assert not [finding for finding in nbguard.report(names).findings if finding.kind == "rest"]


def test_a_tracker_of_metrics_resets_all_of_them() -> None:
    names: dict[str, Any] = {"tracker": Tracker()}
    for _ in range(3):
        names["tracker"].update(torch.ones(100_000))
    before = _allocated(names)
    (finding,) = (finding for finding in nbguard.report(names).findings if finding.kind == "rest")

    assert finding.command == "tracker.reset_all()"
    exec(finding.command, names)

    assert before - _allocated(names) == finding.advice.frees == 3 * 400_000


def test_one_line_resets_metrics_and_lets_go_of_outputs() -> None:
    names: dict[str, Any] = {"model": nn.Sequential(Keeping(), Ranks(), Ranks())}
    names["model"][1].update(torch.ones(100_000))
    names["model"][2].update(torch.ones(200_000))
    names["model"][0](torch.ones(1000, 100))
    before = _allocated(names)
    (finding,) = (finding for finding in nbguard.report(names).findings if finding.kind == "rest")

    assert set(finding.command.split("; ")) == {
        "model[1].reset()",
        "model[2].reset()",
        "model[0].x = None",
        "model[0].outputs.clear()",
    }
    exec(finding.command, names)

    assert before - _allocated(names) == finding.advice.frees
