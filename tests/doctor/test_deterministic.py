"""`nbguard.deterministic`: what follows repeats, and all of it is undone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.doctor.analysis.seed_checks import SwitchStates, seed_checks
from nbguard.training.doctor.analysis.step_trace import Deterministic, StepTimes
from nbguard.training.doctor.determinism.seeds import loader_seeds, sampler_of, switch_states
from nbguard.training.runs.analysis.cell_seeds import seeds_in
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


class Shuffled(torch.utils.data.Sampler[int]):
    """A sampler of the user's that draws from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(32))
        random.shuffle(order)
        return iter(order)


class Seeded(Shuffled):
    """The same with a generator of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(0).sample(range(32), 32))


def _weighted() -> torch.utils.data.Sampler[int]:
    return torch.utils.data.WeightedRandomSampler([1.0] * 32, 32)


def _of_batches() -> torch.utils.data.Sampler[list[int]]:
    return torch.utils.data.BatchSampler(torch.utils.data.SubsetRandomSampler(range(32)), 4, drop_last=False)


@pytest.mark.parametrize(
    ("options", "named", "extra"),
    [
        ({"batch_size": 4, "shuffle": True}, "from torch's global generator", 5),
        ({"batch_size": 4, "sampler": _weighted, "generator": torch.Generator}, "generator, in its WeightedRandomSampler", 5),
        ({"batch_sampler": _of_batches}, "generator, in its SubsetRandomSampler", 5),
        ({"batch_size": 4, "sampler": Shuffled}, "by random.shuffle, in its Shuffled", 0),
    ],
)
def test_a_loader_that_draws_from_a_global_generator_is_named_and_mended(
    options: dict[str, Any], named: str, extra: int
) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32))
    given = {name: value() if callable(value) else value for name, value in options.items()}
    loader = torch.utils.data.DataLoader(data, **given)

    def found() -> list[str]:
        subject = SimpleNamespace(learn=None, loader=loader)
        checks = seed_checks(loader_seeds(subject), SwitchStates(hash_seed="0"), None, "learn")
        return [f"{finding.what} {finding.command}" for check in checks for finding in check.findings]

    (before,) = found()
    assert named in before
    assert "fix determinism learn" in before
    sampler = sampler_of(loader)
    orders = []
    for draws in (0, extra):
        with nbguard.deterministic(1, loader):
            torch.rand(draws)
            orders.append([batch[0].tolist() for batch in loader])
            assert bool(found()) is (extra == 0)  # what the user's own code draws is his to change
    assert orders[0] == orders[1]
    assert (loader.generator is None) is ("generator" not in options)
    assert getattr(sampler, "generator", None) is None
    assert found() == [before]


@pytest.mark.parametrize(
    ("cell", "split"),
    [
        ("RandomSplitter()", "{}(range(40))"),
        ("RandomSubsetSplitter(0.5, 0.5)", "{}(range(40))"),
        ("TrainTestSplitter()", "{}(range(40))"),
        ("ShuffleSplit()", "list(map(str, {}.split(range(40))))"),
        ("KFold(shuffle=True)", "list(map(str, {}.split(range(40))))"),
        ("train_test_split(range(40))", "{}"),
        ("frame.sample(frac=1.0)", "list({}.index)"),
        ("random_split(range(40), [20, 20])", "[list(each) for each in {}]"),
    ],
)
def test_a_split_repeats_by_the_line(cell: str, split: str) -> None:
    from fastai.data.transforms import RandomSplitter, RandomSubsetSplitter, TrainTestSplitter
    from pandas import DataFrame
    from sklearn.model_selection import KFold, ShuffleSplit, train_test_split

    kinds = (RandomSplitter, RandomSubsetSplitter, TrainTestSplitter, KFold, ShuffleSplit, train_test_split)
    names = {each.__name__: each for each in kinds} | {"torch": torch, "frame": DataFrame({"a": range(40)})}
    names |= {"random_split": torch.utils.data.random_split}
    cells = seeds_in(["", f"x = {cell}"])
    (finding,) = (each for check in seed_checks((), SwitchStates(hash_seed="0"), cells) for each in check.findings)
    line = finding.command.replace("…", cell.partition("(")[2].removesuffix(")")).replace("(, ", "(")
    assert str(eval(split.format(line), names)) == str(eval(split.format(line), names))
    assert str(eval(split.format(cell), names)) != str(eval(split.format(cell), names))


def test_the_switches_of_tensor_float32_go_off_by_the_line() -> None:
    subject, backends = SimpleNamespace(model=nn.Linear(1, 1)), torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    try:
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = True
        found = replace(switch_states(subject), uses_gpu=True, hash_seed="0")
        assert len(found.tf32) == 2
        (finding,) = (each for check in seed_checks((), found, None) for each in check.findings if "TensorFloat" in each.what)
        exec(finding.command, {"torch": torch})
        assert switch_states(subject).tf32 == ()
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


def test_a_sampler_with_a_generator_of_its_own_is_in_order() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32))
    torchs = torch.utils.data.RandomSampler(data, generator=torch.Generator()), torch.utils.data.SequentialSampler(data)
    for sampler in (Seeded(), *torchs):
        (seeds,) = loader_seeds(SimpleNamespace(learn=None, loader=torch.utils.data.DataLoader(data, sampler=sampler)))
        assert seeds.sampler == ""


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
