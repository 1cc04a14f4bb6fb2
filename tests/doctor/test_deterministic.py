"""`nbguard.deterministic`: what follows repeats, and all of it is undone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.doctor.analysis.step_trace import Deterministic, StepTimes
from tests.doctor import learners, planted
from tests.doctor.untouched import fingerprint


def drawn() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_everything_is_set_and_undone() -> None:
    model = nn.Linear(2, 2)
    before = fingerprint(model)

    with nbguard.deterministic(7) as switch:
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)
        first = drawn()
        assert switch.state.seed == 7
    assert fingerprint(model) == before
    with nbguard.deterministic(7, warn_only=True):
        assert torch.get_deterministic_debug_mode() == 1
        assert drawn() == first
    assert fingerprint(model) == before


def test_a_learners_loaders_repeat_whatever_else_is_drawn() -> None:
    learn, _, _ = learners.make("tabular")
    before = fingerprint(learn.model, learn)

    orders = []
    for extra in (0, 3):
        with nbguard.deterministic(5, learn) as switch:
            for _ in range(extra):
                drawn()
            orders.append([batch[1].sum().item() for batch in learn.dls.train])
            assert switch.state.loaders == ("the training loader", "the validation loader")
    assert orders[0] == orders[1]
    after = fingerprint(learn.model, learn)
    del before["loader"], after["loader"]  # what the test's own epochs leave: indices
    assert {key for key in before if before[key] != after[key]} == set()


def test_torchs_loader_gets_a_generator_and_loses_it() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    orders = []
    for extra in (0, 5):
        with nbguard.deterministic(1, loader):
            torch.rand(extra)
            orders.append([batch[0].tolist() for batch in loader])
    assert orders[0] == orders[1]
    assert loader.generator is None
    assert loader.sampler.generator is None


def test_generators_of_the_models_own_are_seeded() -> None:
    model = planted.faulty(planted.NumpyGenerator)
    state = str(model[1].rng.bit_generator.state)

    values = []
    for _ in range(2):
        with nbguard.deterministic(3, model) as switch:
            values.append(model(torch.ones(2, planted.WIDTH)).sum().item())
            assert switch.state.generators == ("model[1].rng",)
    assert values[0] == values[1]
    assert str(model[1].rng.bit_generator.state) == state


def test_the_fix_of_a_planted_generator_works() -> None:
    """What the doctor names with `%nbguard fix determinism` repeats once it is done."""
    results = []
    for _ in range(2):
        model = planted.faulty(planted.Dropout)
        with nbguard.deterministic(2, model):
            results.append(model(torch.ones(4, planted.WIDTH)).detach())
        torch.rand(3)
    assert torch.equal(*results)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", None, True])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    before = drawn_state()

    with pytest.raises(NbguardError, match="a seed is a whole number from 0 to 4294967295"):
        nbguard.deterministic(seed)
    assert drawn_state() == before


def drawn_state() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist(), torch.get_deterministic_debug_mode()


def test_it_is_shown_with_the_measured_slow_down() -> None:
    state = Deterministic(is_on=True, seed=4, mode="on", loaders=("the training loader",))
    times = StepTimes(plain=10_000_000, deterministic=12_500_000, change=0.25, margin=0.02)
    text = state.timed(times).mimebundle()["text/plain"]
    refused = state.timed(StepTimes(plain=1, refused=("put_",))).mimebundle()["text/plain"]

    assert "+25 % ± 2: a step took 10.0 ms, now 12.5 ms" in text
    assert "put_ has no deterministic implementation and will raise; --warn-only lets it pass" in refused
    assert "not measured: %nbguard fix determinism learn measures it" in state.mimebundle()["text/plain"]
    assert "not measurable" in state.timed(StepTimes(plain=1, deterministic=1)).mimebundle()["text/plain"]
    assert "restored" in Deterministic(is_on=False, seed=4).mimebundle()["text/plain"]


@pytest.mark.parametrize(
    ("plain", "deterministic", "change", "margin"),
    [
        ([100] * 10, [103] * 10, 0.03, 0.0),
        ([100] * 6, [100, 101, 102, 103, 104, 105], 0.025, 0.025),  # of six pairs the interval is all of them
        ([100] * 5, [103] * 5, None, None),  # too few for an interval
        ([100, 300] * 8, [300, 100] * 8, None, 4 / 3),  # another program took the processor now and then
        ([100, 900] * 8, [110, 990] * 8, 0.1, 0.0),  # a machine that is slow for a while slows both of a pair
    ],
)
def test_a_slow_down_is_known_with_its_interval_or_is_no_figure(
    plain: list[int], deterministic: list[int], change: float | None, margin: float | None
) -> None:
    times = StepTimes.of(plain, deterministic)

    assert times.change == (None if change is None else pytest.approx(change))
    assert times.margin == (None if margin is None else pytest.approx(margin))


def test_what_cannot_be_seeded_leaves_no_mode_on() -> None:
    learn, _, _ = learners.make("tabular")
    before = fingerprint(learn.model, learn)
    learn.dls.loaders.append(3)

    with pytest.raises(TypeError):
        nbguard.deterministic(5, learn)
    learn.dls.loaders.pop()
    assert fingerprint(learn.model, learn) == before
