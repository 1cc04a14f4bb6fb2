"""Lines of the loop that make a call which is known to take long: the report says which, and what to do instead."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.memory_growth import Growth, growth_finding
from nbguard.training.profiler.analysis.time.stacks import KNOWN_CALLS, known_call
from tests.profiler.loops import train


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("torch.save(model.state_dict(), 'last.pt')", "torch.save"),
        ("best = copy.deepcopy(model)", "deepcopy"),
        ("x = torch.tensor([frames[k] for k in picked])", "torch.tensor"),
        ("frame.to_csv('log.csv'); done = True", "to_csv"),
        ("print(frame.describe())", "print"),
        ("blueprint(x)", ""),
        ("reopen(x)", ""),
        ("print(torch.tensor(rows))", ""),  # which of them is not known
        ("loss = criterion(model(x), y)", ""),
    ],
)
def test_the_call_of_a_line(line: str, call: str) -> None:
    assert known_call(line) == call
    assert not call or KNOWN_CALLS[call]


def test_a_collection_that_takes_long_is_not_forbidden_where_cycles_want_it() -> None:
    """A fit whose reference cycles hold memory is told to collect now and then: the advice that follows must not undo this."""
    growth = growth_finding(Growth(per_batch=2**20, batches=40, holder="unreachable cycles", root="garbage"))
    assert "call `gc.collect()`" in growth.change
    assert "less often" in KNOWN_CALLS["gc.collect"]
    assert "reference cycles" in KNOWN_CALLS["gc.collect"]


@pytest.mark.slow
def test_the_call_that_takes_long_is_said_with_its_remedy(tmp_path: Path) -> None:
    """Each line in turn is the slow one of a loop; what comes instead is silent."""
    big = torch.zeros(600, 600)
    rows = [[float(n) for n in range(400)] for _ in range(400)]

    def saves() -> None:
        for number in range(20):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save([big, number], tmp_path / "last.pt")

    def makes() -> None:
        for _ in range(20):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.tensor(rows).sum().item())

    def copies() -> None:
        for _ in range(20):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(len(copy.deepcopy(rows)))

    def writes(number: int) -> None:
        torch.save([big, number], tmp_path / "last.pt")

    def saves_in_a_function() -> None:
        for number in range(20):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            writes(number)

    model, x, kept = torch.nn.Linear(4, 1), torch.ones(8, 4), []  # type: ignore[var-annotated]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fits: tuple[tuple[Callable[[], Any], str], ...] = (
        (saves, "torch.save"),
        (makes, "torch.tensor"),
        (copies, "deepcopy"),
        (saves_in_a_function, "torch.save"),
    )
    for fit, call in fits:
        with profile_fit(show=False) as profile:
            begun = time.perf_counter()
            while time.perf_counter() < begun + 1:
                fit()
        assert f"in `{call}`: {KNOWN_CALLS[call]}" in " ".join(profile.report.first), call


def test_a_loop_without_any_says_nothing_of_them() -> None:
    with profile_fit(show=False) as profile:
        train()
    assert not [f for f in profile.report.findings if f.kind == "code"]
