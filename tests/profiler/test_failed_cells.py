"""Fits that fail in a notebook: the report is of the fit, not of the traceback, and begins with the cause where it is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch  # noqa: F401 - the cells need it, so the module is none of `make unit`
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

_SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(33, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
_FIT = """%%profile_fit -o report
for _ in range(3):
    for xb, yb in DataLoader(data, batch_size=8, shuffle=True{more}):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
{then}
"""
_SLOW = 1.0


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "nbguard")
    with capture_output():
        shell.run_cell(_SETUP, store_history=True).raise_error()
    yield shell
    shell.run_line_magic("unload_ext", "nbguard")


def run(shell: Any, more: str = "", then: str = "") -> tuple[Any, Any]:
    """Run the fit; return the report and what the cell ended with. Tracebacks take a second."""

    def slow(*args: Any, **kw: Any) -> None:
        shell.user_ns["failed_after"] = time.perf_counter_ns() - started
        time.sleep(_SLOW)

    shell.showtraceback = slow
    started = time.perf_counter_ns()
    with capture_output():
        result = shell.run_cell(_FIT.format(more=more, then=then), store_history=True)
    assert vars(shell).pop("showtraceback") is slow
    return shell.user_ns["report"], result


def test_a_last_batch_of_one_before_batch_norm(shell: Any) -> None:
    report, result = run(shell)

    assert type(result.error_in_exec) is ValueError
    assert report.ending == "error"
    assert report.first[0].startswith("the fit failed at a batch of one item")
    assert "`DataLoader(…, drop_last=True)`" in report.first[0]
    assert report.timing.wall < shell.user_ns["failed_after"]
    cured, result = run(shell, ", drop_last=True")
    assert result.success
    assert cured.first[0].startswith("nothing stands out")


_LOSS = "loss = nn.functional.cross_entropy(model(xb), yb[:3])"


@pytest.mark.parametrize(
    ("body", "epochs"),
    [
        ("optimizer.zero_grad(); " + _LOSS, [(True, 1)]),
        (_LOSS, [(True, 1)]),
        ("model(xb[:, :3])", [(True, 1)]),
        ("model.eval(); " + _LOSS, [(False, 1)]),
        ("yb.sum()\n    with torch.no_grad(): " + _LOSS, [(False, 1)]),
        ("xb + yb", []),
    ],
)
def test_a_first_batch_that_fails_before_its_loss(shell: Any, body: str, epochs: list[tuple[bool, int]]) -> None:
    shell.showtraceback = lambda *_, **__: None
    with capture_output():
        result = shell.run_cell(f"%%profile_fit -o report\nfor xb, yb in DataLoader(data, batch_size=8):\n    {body}")
    report = shell.user_ns["report"]

    assert type(result.error_in_exec) in (ValueError, RuntimeError)
    assert [(epoch.is_training, epoch.batches) for epoch in report.timing.epochs] == epochs
    assert report.timing.batches == sum(batches for is_training, batches in epochs if is_training)


def test_a_traceback_that_the_cell_shows_itself_does_not_end_the_profile(shell: Any) -> None:
    inner = "get_ipython().run_cell('1 / 0')\ntry: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()\nlater = 1"
    report, result = run(shell, ", drop_last=True", inner)

    assert result.success
    assert report.ending == "complete"
    assert report.timing.wall > 2 * _SLOW * 1e9  # both tracebacks


def test_any_other_error_is_reported_as_before(shell: Any) -> None:
    report, result = run(shell, ", drop_last=True", "raise ValueError('Expected')")

    assert type(result.error_in_exec) is ValueError
    assert (report.ending, report.error, report.timing.batches) == ("error", "ValueError", 12)
    assert not [finding for finding in report.findings if finding.kind == "failure"]
