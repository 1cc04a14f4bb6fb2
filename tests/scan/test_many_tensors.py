"""More tensors than a look goes into: a plan says `at least`, as the report does."""

from __future__ import annotations

import pytest
import torch

import nbguard
from nbguard.memory.scan.heap import walk


def test_a_plan_says_that_it_is_a_lower_bound_as_the_report_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MOST_TENSORS", 50)
    names = {"keep": torch.ones(5), "thing": [torch.ones(1) for _ in range(200)]}

    report, plan = nbguard.report(namespace=names), nbguard.plan("thing", namespace=names)

    (row,) = [holder for device in report.devices for holder in device.holders if holder.label == "thing"]
    assert row.at_least
    assert plan.at_least
    assert plan.promised < 800
    assert not nbguard.plan("keep", namespace=names).at_least
