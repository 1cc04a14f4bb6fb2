"""Before a batch runs again, everything is as it was before its first try; each test fails without one part of that."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.survive.generators import Generators
from nbguard.training.survive.state import StateBefore
from tests.survive.planted import MESSAGE, Planted, TooLarge, every_place, largest_difference, net


@cache
def xs() -> Any:
    """Return the inputs."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@cache
def ys() -> Any:
    """Return the targets."""
    return torch.arange(8) % 4


class _Dropping(nn.Module):  # type: ignore[misc]
    """Leaves layers out by chance, as LayerDrop does."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head, self.draw = nn.ModuleList(nn.Linear(6, 6) for _ in range(6)), nn.Linear(6, 4), draw

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x)
        return self.head(x)


def _numpy_draw() -> float:
    import numpy as np

    return float(np.random.random())


def _torch_draw(generator: Any) -> float:
    return float(torch.rand((), generator=generator))


@pytest.mark.parametrize("draw", [random.random, _numpy_draw])
def test_numbers_of_python_and_numpy_are_drawn_again(draw: Callable[[], float]) -> None:
    """A whole batch that ran out of memory draws the same ones, and so does each piece in its backward pass."""
    np = pytest.importorskip("numpy")

    def run(rows: int, items: int | None = None) -> Any:
        model = _Dropping(draw)
        random.seed(5)
        np.random.seed(5)
        with nbguard.survive(model, items=items) as guard, TooLarge(rows):
            model(xs()).square().sum().backward()
        return [[p.grad for p in model.parameters() if p.grad is not None], random.getstate(), draw()], guard.changes

    state, changes = run(4)
    from_the_start, _ = run(8, items=4)
    assert largest_difference(state, from_the_start) == 0
    assert changes[0].draws


def test_generators_say_whether_they_moved() -> None:
    np = pytest.importorskip("numpy")
    draws = [random.random, np.random.random, lambda: torch.rand(()), lambda: np.random.normal(size=3)]
    draws += [lambda: random.gauss(0, 1)] * 2 + [np.random.normal] * 2  # the second is drawn with the first
    for draw in draws:
        before = Generators()
        first = draw()
        assert before.restore()
        assert not before.restore()
        again = draw()
        assert largest_difference(torch.as_tensor(first), torch.as_tensor(again)) == 0


def test_a_generator_of_the_models_own_is_state() -> None:
    np = pytest.importorskip("numpy")
    for own in (torch.Generator().manual_seed(0), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)):
        model = _Dropping(
            lambda own=own: float(torch.rand((), generator=own) if type(own) is torch.Generator else own.random())
        )
        model.own = own
        with nbguard.survive(model) as guard, pytest.raises(torch.OutOfMemoryError), TooLarge(4):
            model(xs())
        assert "`own`" in guard.changes[0].refusal


def _scaled(at: int) -> tuple[Any, Planted]:
    """Return the state after three steps with a scaler, clipping and an overflow in the second."""
    torch.manual_seed(0)
    model, planted = nn.Linear(6, 4), Planted(at)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    guard = nbguard.survive(model, optimizer, scaler)
    seen = []

    @guard
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(xs()), ys()) * (float("inf") if number == 1 else 1)
        scaler.scale(loss).backward()
        planted.is_armed = False
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        seen.append({key: str(value) for key, value in scaler._per_optimizer_states[id(optimizer)].items()})
        scaler.update()

    with guard, planted:
        for number in range(3):
            planted.is_armed = number in (0, 1)
            step(number)
    assert not any(change.refusal for change in guard.changes)
    return [model.state_dict(), optimizer.state_dict()["state"], scaler.state_dict(), seen], planted


def test_a_gradient_scaler_is_as_without_the_error() -> None:
    plain, _ = _scaled(0)
    assert plain[2]["scale"] == 2.0**11, "it grew, fell and grew"

    def run(at: int) -> Planted:
        state, planted = _scaled(at)
        assert largest_difference(plain, state) <= 1e-6
        return planted

    assert every_place(run) > 10


@pytest.mark.parametrize("what", ["weights", "scale"])
def test_a_step_that_had_changed_weights_or_scale_is_not_run_again(what: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(xs()).sum()).backward()
    scaler.unscale_(optimizer)
    guard = nbguard.survive(model, optimizer, scaler)

    @guard
    def late() -> None:
        if what == "weights":
            optimizer.step()
        else:
            scaler.update()
        optimizer.zero_grad()
        model(xs())
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(torch.OutOfMemoryError):
        late()
    assert "changed weights or the scale" in guard.changes[0].refusal


def test_autocast_is_nested_and_set_as_before() -> None:
    """An error between `__enter__` and `__exit__` of a callback leaves autocast on, a level deeper."""
    model = net()
    guard = nbguard.survive(model)
    seen = []

    @guard
    def step() -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()))
        torch.autocast_decrement_nesting()
        half = torch.autocast("cpu", torch.bfloat16)
        half.__enter__()
        loss = model(xs()).float().sum()
        if len(seen) == 1:
            raise torch.OutOfMemoryError(MESSAGE)
        half.__exit__(None, None, None)
        loss.backward()

    with torch.autocast("cpu", torch.float16, enabled=False):
        step()
        assert torch.get_autocast_dtype("cpu") is torch.float16

    assert seen == [seen[0]] * 2
    assert not torch.is_autocast_enabled("cpu")


class _Casts(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_autocasts_cache_is_empty() -> None:
    """It holds copies of the weights for a batch that failed."""
    model = nn.Linear(6, 4)
    x = xs().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        before = StateBefore([])
        counts = []
        for restores in (False, False, True):
            if restores:
                before.restore()
            with _Casts() as casts:
                model(x)
            counts.append(casts.count)
    assert counts == [2, 0, 2]


def test_gradients_of_earlier_batches_are_the_same_tensors() -> None:
    """A pass that failed adds to none of them, and a retry adds once, in place."""

    def run(at: int) -> Planted:
        model, planted = net(), Planted(at)
        model(xs()).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        first = [gradient.clone() for gradient in gradients]
        guard = nbguard.survive(model)

        @guard
        def step() -> None:
            model(xs()).square().sum().backward()

        with guard, planted:
            planted.is_armed = True
            step()
        assert all(parameter.grad is one for parameter, one in zip(model.parameters(), gradients, strict=True))
        assert largest_difference([2 * each for each in first], gradients) <= 1e-5
        return planted

    assert every_place(run) > 15


@pytest.mark.parametrize("as_function", [False, True])
def test_a_guard_that_is_over_keeps_no_model(as_function: bool) -> None:
    def fit() -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        guard = nbguard.survive(model, optimizer)

        def work() -> None:
            with TooLarge(4):
                model(xs()).sum().backward()

        if as_function:
            guard(work)()
        else:
            with guard:
                work()
        return guard, [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]

    guard, kept = fit()
    gc.collect()
    assert guard.changes
    assert [ref() for ref in kept] == [None] * 3
    with pytest.raises(NbguardError, match="gone"), guard:
        pass


def test_a_callback_that_is_over_keeps_no_model() -> None:
    from tests.survive.test_libraries import _learner

    learner, survives = _learner(), nbguard.SurviveOOM()
    with learner.no_bar(), learner.no_logging(), TooLarge(4):
        learner.fit(1, cbs=survives)
    kept = weakref.ref(learner.model)
    sys.modules["fastai.learner"].__dict__.pop("_", None)
    del learner
    gc.collect()
    assert kept() is None
    assert survives.changes
