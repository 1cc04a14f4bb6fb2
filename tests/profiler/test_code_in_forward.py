"""Functions that a `forward` calls: one that goes through tensors value by value is named, the model's own are not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport


def value_by_value(x: torch.Tensor) -> torch.Tensor:
    """Fill a tensor in a loop over values, as targets of boxes are built."""
    out, cut = torch.zeros(x.shape), x.detach()
    for row in range(len(x)):
        for column in range(x.shape[1]):
            out[row, column] = int(cut[row, column] > 0)
    return out


def at_once(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).float()


def work(x: torch.Tensor) -> torch.Tensor:
    """Compute what is the model's own, for a long time."""
    for _ in range(40):
        x = (x @ x.T @ x).tanh()
    return x


class Net(nn.Module):
    """A model, or a loss, that calls functions in its `forward`."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.layer, self.functions = nn.Linear(32, 32), functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function in self.functions:
            x = x + function(x)
        return self.layer(x)


def fit(model: nn.Module, loss: nn.Module | None = None, seconds: float = 1.5) -> FitReport:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with profile_fit(show=False) as profile:
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            out = model(torch.randn(32, 32))
            (out if loss is None else loss(out)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile.report


@pytest.mark.parametrize("is_in_loss", [False, True])
def test_a_loop_over_values_in_a_forward_is_named_and_its_cure_is_silent(is_in_loss: bool) -> None:
    def report(*functions: Any) -> FitReport:
        return fit(Net(), Net(*functions)) if is_in_loss else fit(Net(*functions))

    first = report(value_by_value).first[0]
    assert first.startswith("`value_by_value` (")
    assert "compute on whole tensors" in first
    assert not [f for f in report(at_once).findings if f.kind == "code"]


def test_a_function_that_is_the_model_itself_has_no_blame() -> None:
    assert not [f for f in fit(Net(work)).findings if f.kind == "code"]
