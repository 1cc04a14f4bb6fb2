"""Graphs that are kept or recorded for nothing: the line that does it is named, and what uses its graphs is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.utils.data import DataLoader

from nbguard.training.profiler.checks.graphs import RetainWatch, UnusedGraphWatch, retained_finding, unused_findings
from nbguard.training.profiler.checks.optimizers import OptimizerWatch
from tests.profiler.recording import recording

BATCH, WIDTH = 64, 32


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))


def _batches() -> Iterator[Any]:
    return iter(DataLoader([torch.ones(WIDTH)] * (8 * BATCH), batch_size=BATCH))  # type: ignore[arg-type]


@contextmanager
def nothing() -> Iterator[None]:
    yield


# --- retain_graph ---


def _plain(loss: Any, _x: Any, retain: bool = True) -> None:
    loss.mean().backward(retain_graph=retain)


def _twice(loss: Any, _x: Any) -> None:
    loss.mean().backward(retain_graph=True)
    loss.square().mean().backward()


def _asked(loss: Any, x: Any) -> None:
    loss.mean().backward(retain_graph=True)
    torch.autograd.grad(loss.sum(), x)


@pytest.mark.parametrize(
    ("backward", "asks", "unused"),
    [(_plain, False, 8), (partial(_plain, retain=False), False, 0), (_twice, False, 0), (_asked, True, 0)],
    ids=["for nothing", "not kept", "a second pass", "grad"],
)
def test_a_graph_that_is_kept_for_nothing_is_named_by_its_line(backward: Callable[..., None], asks: bool, unused: int) -> None:
    watch, model = RetainWatch(), _model()
    with recording(watch):
        for x in _batches():
            x.requires_grad_(asks)
            backward(model(x), x)

    facts, found = watch.observe(), list(retained_finding(watch.observe()))
    assert facts.unused == unused
    assert len(found) == bool(unused)
    if found:
        assert "test_graph_checks.py:" in facts.where
        assert "in _plain()" in facts.where
        hidden = BATCH * 4 * WIDTH * 4  # the result of ReLU, which both it and the next layer keep
        assert hidden <= facts.nbytes <= hidden + BATCH * WIDTH * 4 + 1024
        loss = model(torch.ones(1, WIDTH)).mean()
        exec(found[0].change.strip("`"), {"loss": loss})
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_state_that_is_carried_from_batch_to_batch_needs_its_graph() -> None:
    watch, cell, state = RetainWatch(), nn.GRUCell(WIDTH, WIDTH), torch.zeros(BATCH, WIDTH)
    with recording(watch):
        for x in _batches():
            state = cell(x, state)
            state.mean().backward(retain_graph=True)

    assert list(retained_finding(watch.observe())) == []


# --- graphs that nobody uses ---


def _evaluate(model: nn.Module, *, asks: bool = False) -> float:
    return sum(float(model(x.requires_grad_(asks)).mean().detach()) for x in _batches())


def _train(model: nn.Module) -> None:
    for x in _batches():
        model(x).mean().backward()


def _by_hand(model: nn.Module) -> float:
    x, total = torch.ones(BATCH, WIDTH), 0.0
    for _ in range(6):
        total += model(x).mean().item()
    return total


def _kept(model: nn.Module) -> None:
    torch.stack([model(x).mean() for x in _batches()]).mean().backward()


def _meta(model: nn.Module) -> None:
    for x in _batches():
        torch.autograd.grad(model(x).mean(), list(model.parameters()))


def _functional(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for x in _batches():
        grad(lambda p, x=x: functional_call(model, p, (x,)).mean())(parameters)


@pytest.mark.parametrize(
    ("run", "around", "is_evaluated", "lines"),
    [
        (_evaluate, nothing, True, 1),
        (_evaluate, nothing, False, 1),
        (_by_hand, nothing, True, 1),
        (_evaluate, torch.no_grad, True, 0),
        (_evaluate, torch.inference_mode, True, 0),
        (partial(_evaluate, asks=True), nothing, True, 0),
        (_kept, nothing, False, 0),
        (_meta, nothing, False, 0),
        (_functional, nothing, False, 0),
    ],
    ids=["forgotten", "train mode", "by hand", "no_grad", "inference_mode", "saliency", "one loss of many", "grad", "func"],
)
def test_an_evaluation_that_records_graphs_is_named_by_its_line(
    run: Callable[..., Any], around: Any, is_evaluated: bool, lines: int
) -> None:
    watch, model = UnusedGraphWatch(), _model()
    with recording(watch):
        for _ in range(2):
            _train(model.train())
            model.train(not is_evaluated)
            with around():
                run(model)

    facts, found = watch.observe(), list(unused_findings(watch.observe()))
    assert len(facts.lines) == len(found) == lines
    if found:
        (line,) = facts.lines
        assert f"in {line.function}()" in line.where
        hidden = BATCH * 4 * WIDTH * 4
        assert hidden <= line.nbytes <= hidden + 1024
        code = found[0].change.split("`")
        names = {"torch": torch, "model": model}
        exec(f"{code[1]}\n    assert not model(torch.ones(1, {WIDTH})).requires_grad", names)
        exec(f"{code[3]}\ndef {line.function}(): return model(torch.ones(1, {WIDTH}))", names)
        assert not names[line.function]().requires_grad  # type: ignore[operator]


def test_samples_in_eval_mode_inside_of_the_training_pass_are_no_evaluation() -> None:
    watch, model, generator = UnusedGraphWatch(), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH).eval()
    with recording(watch):
        for x in _batches():
            functional.relu(model(x)).mean().backward()
            generator(x)

    assert watch.observe().lines == ()


def test_a_module_whose_hash_is_made_of_its_state_is_one_module() -> None:
    """As each metric of torchmetrics, which a loop calls on its outputs."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def __hash__(self) -> int:
            return hash((id(self), *self.seen))

        def forward(self, values: Any) -> float:
            self.seen.append(values.mean().item())
            return sum(self.seen) / len(self.seen)

    model, mean = _model(), Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(UnusedGraphWatch(), optimizers := OptimizerWatch()):
        with torch.no_grad():  # as before the first epoch: its hash is asked for, and its state changes
            mean(torch.ones(2))
        for _ in range(6):
            mean(torch.ones(2))
            output = model(torch.ones(2, WIDTH))
            mean(output)
            optimizer.zero_grad()
            output.sum().backward()
            optimizer.step()

    assert optimizers.observe().optimizers[0].steps == 6
