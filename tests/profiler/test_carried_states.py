"""Loops whose batches take longer and longer, as a state carries the graph of all batches so far; and loops like them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.instruments import growth_watch as growth

HEAD = """
import torch
from torch import nn

class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.GRUCell(8, 8), torch.zeros(4, 8)
    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.state

torch.manual_seed(0)
gru, lstm, carrying, head = nn.GRU(8, 8), nn.LSTM(8, 8), Carrying(), nn.Linear(8, 1)
"""
OF_A_GLOBAL = """
hidden = torch.zeros(1, 4, 8)
for x in torch.randn(BATCHES, 3, 4, 8):
    CUT
    out, hidden = gru(x, hidden)
    loss = head(out).mean()
    loss.backward(RETAIN)
"""
OF_A_FUNCTION = f"""
def train():
    {OF_A_GLOBAL.strip().replace(chr(10), chr(10) + "    ")}
train()
"""
OF_A_PAIR = """
hidden = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
for x in torch.randn(BATCHES, 3, 4, 8):
    CUT
    out, hidden = lstm(x, hidden)
    head(out).mean().backward(RETAIN)
"""
OF_A_MODULE = """
for x in torch.randn(BATCHES, 4, 8):
    CUT
    head(carrying(x)).mean().backward(RETAIN)
"""
BY_HAND = """
optimizer, hidden = torch.optim.SGD(head.parameters(), 0.1), torch.zeros(1, 4, 8)
for x in torch.randn(BATCHES, 3, 4, 8):
    CUT
    out, hidden = gru(x, hidden)
    head(out.sum(0)).mean().backward(RETAIN)
    for parameter in head.parameters():
        parameter.data -= 0.1 * parameter.grad
    optimizer.zero_grad()
"""


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The names of a script, which stand for those of a notebook; new ones go after the test."""
    namespace = sys.modules["__main__"].__dict__
    before = set(namespace)
    exec(HEAD, namespace)
    yield namespace
    for name in set(namespace) - before:
        del namespace[name]


@pytest.fixture(autouse=True)
def large_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests before this one have left so much that a look at the heap may take longer than a fit is held up for."""
    monkeypatch.setattr(growth, "_TOO_SLOW", float("inf"))


def findings(
    loop: str, names: dict[str, Any], *, batches: int = 12, cut: str = "pass", retain: bool = True
) -> list[FitFinding]:
    """Return what a profile finds of memory that grows."""
    code = loop.replace("BATCHES", str(batches)).replace("CUT", cut).replace("RETAIN", "retain_graph=True" if retain else "")
    with profile_fit(show=False) as profile:
        exec(code, names)
    assert profile.report.timing.batches >= batches
    assert not profile.report.notes
    return [finding for finding in profile.report.findings if finding.kind in ("graph", "growth")]


@pytest.mark.parametrize(
    ("loop", "holder"),
    [(OF_A_GLOBAL, "hidden"), (OF_A_FUNCTION, "hidden"), (OF_A_PAIR, "hidden"), (OF_A_MODULE, "state"), (BY_HAND, "hidden")],
    ids=["global", "function", "pair", "module", "parameters set by hand"],
)
def test_a_carried_state_is_named_in_a_dozen_batches_and_the_line_cures_it(
    names: dict[str, Any], loop: str, holder: str
) -> None:
    """Bug case 16: the loop never steps, and has too few batches for its memory to be diagnosed."""
    (finding,) = findings(loop, names)

    assert (finding.kind, finding.severity) == ("graph", "problem")
    assert re.search(rf"\b{holder}\b", finding.what)
    assert "`retain_graph=True`" in finding.change
    line = finding.change.split("`")[1]
    assert line.startswith(holder) or f".{holder} = " in line
    exec(HEAD, names)
    assert findings(loop, names, cut=line, retain=False) == []


def test_the_profile_leaves_the_gradients_as_they_are(names: dict[str, Any]) -> None:
    without = OF_A_GLOBAL.replace("BATCHES", "12").replace("CUT", "pass").replace("RETAIN", "retain_graph=True")
    exec(without, names)
    expected = [parameter.grad.clone() for parameter in names["gru"].parameters()]
    exec(HEAD, names)

    findings(OF_A_GLOBAL, names)

    assert all(map(torch.equal, expected, (parameter.grad for parameter in names["gru"].parameters())))


RETAINED = """
for x in torch.randn(BATCHES, 3, 4, 8):
    loss = head(gru(x)[0]).mean()
    loss.backward(RETAIN)
"""
TWO_LOSSES = """
for x in torch.randn(BATCHES, 3, 4, 8):
    out = head(gru(x)[0])
    out.mean().backward(RETAIN)
    out.square().mean().backward()
"""
SECOND_ORDER = """
for x in torch.randn(BATCHES, 4, 8):
    x.requires_grad_()
    gradient, = torch.autograd.grad(head(x).exp().sum(), x, create_graph=True)
    gradient.square().mean().backward(RETAIN)
"""


@pytest.mark.parametrize("loop", [RETAINED, TWO_LOSSES, SECOND_ORDER], ids=["needless", "two losses", "penalty"])
def test_graphs_that_only_stay_for_a_batch_are_no_growth(names: dict[str, Any], loop: str) -> None:
    assert findings(loop, names, batches=20) == []


def test_the_process_is_looked_at_for_a_kept_graph_only_where_tensors_grow(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    held = growth.GrowthWatch._held
    monkeypatch.setattr(growth.GrowthWatch, "_held", lambda watch: (looks.append(1), held(watch))[1])

    findings(RETAINED, names, batches=20)
    assert not looks
    findings(OF_A_GLOBAL, names)
    assert len(looks) == 2
