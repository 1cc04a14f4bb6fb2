"""A peak that is higher since more parameters are trained: the reason is told, with what gradients and state take."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fastai.basics import DataLoaders, Learner, params
from fastai.callback.schedule import fine_tune  # noqa: F401 - gives Learners their fine_tune
from fastai.data.load import DataLoader as FastaiLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.memory_growth import MemoryObservations, Unfrozen, unfrozen_finding
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.instruments import timeline
from nbguard.units import MiB

pytestmark = pytest.mark.usefixtures("_reads_at_any_cost")
WIDTH = 1024
BODY = 64 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH  # values


@pytest.fixture
def _reads_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Malloc's counter goes through all that other tests have freed."""
    monkeypatch.setattr(timeline, "_SLOW", 1_000_000_000)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(64, 64), torch.randint(2, (64,)))


def net() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(body, nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 2)))


def fine_tuned(*, unfreezes: bool) -> None:
    loaders = DataLoaders(FastaiLoader(data(), bs=16), FastaiLoader(data(), bs=16))
    learn = Learner(loaders, net(), loss_func=nn.CrossEntropyLoss(), splitter=lambda m: [params(m[0]), params(m[1])])
    learn.remove_cb(learn.progress)
    with learn.no_logging():
        if unfreezes:
            learn.fine_tune(1)
        else:
            learn.freeze()
            learn.fit(2)


def two_stages(*, unfreezes: bool, is_new: bool = True, loads: bool = True) -> None:
    """Train the head, and then all; `is_new`: by a new optimizer."""
    model = net()
    model[0].requires_grad_(False)
    rows = data()
    optimizer: Any = torch.optim.Adam(model[1].parameters() if is_new else model.parameters())
    for stage in range(2):
        if stage:
            model[0].requires_grad_(unfreezes)
            optimizer = torch.optim.Adam(model.parameters()) if is_new and unfreezes else optimizer
        for x, y in DataLoader(data(), batch_size=16) if loads else [rows[at : at + 16] for at in range(0, 64, 16)]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def adversaries(**_: Any) -> None:
    """Each rests while the other one is trained."""
    maker, critic = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH)
    steps = {part: torch.optim.Adam(part.parameters()) for part in (critic, maker)}
    for x, _y in DataLoader(data(), batch_size=16):
        for part, optimizer in steps.items():
            critic.requires_grad_(part is critic)
            optimizer.zero_grad()
            critic(maker(x)).mean().backward()
            optimizer.step()


def found(fit: Any, **settings: Any) -> list[FitFinding]:
    gc.collect()  # malloc counts what other tests have left, until it goes
    with profile_fit(show=False) as profile:
        fit(**settings)
    return [finding for finding in profile.report.findings if finding.kind == "unfrozen"]


@pytest.mark.parametrize(
    ("fit", "settings"),
    [(fine_tuned, {}), (two_stages, {}), (two_stages, {"is_new": False}), (two_stages, {"loads": False})],
)
def test_parameters_that_are_trained_later_are_the_reason_for_a_higher_peak(fit: Any, settings: dict[str, bool]) -> None:
    (finding,) = found(fit, **settings, unfreezes=True)

    assert finding.severity == "note"
    assert "because 4 more parameters are trained" in finding.what
    assert finding.nbytes is not None
    assert BODY * 4 < finding.nbytes < 5 * BODY * 4  # gradients and two moments of Adam: 3, of which readings may miss one
    kept = float(finding.evidence.partition(" take ")[2].split()[0]) * MiB
    assert kept == pytest.approx(3 * BODY * 4, rel=0.01)
    assert "requires_grad_(False)" in finding.change
    assert found(fit, **settings, unfreezes=False) == []  # as advised


def layer_by_layer() -> None:
    """Train the last of four layers, then two of them, then all, each time by a new optimizer."""
    model, x = (
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]).requires_grad_(False),
        torch.ones(4, WIDTH),
    )
    for layers in (1, 2, 4):
        model[-layers:].requires_grad_(True)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        for _ in range(4):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def test_each_stage_has_its_gradients_and_its_state() -> None:
    gc.collect()
    with profile_fit(show=False) as profile:
        layer_by_layer()
    observed = profile.observations.memory
    assert isinstance(observed, MemoryObservations)
    assert observed.unfrozen is not None
    layer = WIDTH * WIDTH * 4
    assert [(each.begins, each.gradients, each.state // layer) for each in observed.unfrozen.stages] == [
        (1, layer, 2),
        (5, 2 * layer, 4),
        (9, 4 * layer, 8),
    ]
    (finding,) = [each for each in profile.report.findings if each.kind == "unfrozen"]
    assert "from batch 5 on" in finding.evidence


def test_two_optimizers_in_turn_unfreeze_nothing() -> None:
    assert found(adversaries) == []


@pytest.mark.parametrize(("peak", "kept", "said"), [(40, 30, 1), (10, 30, 0), (10.5, 30, 0), (900, 30, 0)])
def test_it_is_the_reason_only_where_it_takes_a_part_of_what_the_peak_rose_by(peak: float, kept: int, said: int) -> None:
    facts = Unfrozen(parameters=4, peak=10 * MiB, kept=kept * MiB)
    assert len(list(unfrozen_finding(facts, round(peak * MiB)))) == said
