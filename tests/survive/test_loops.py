"""Loops of one's own: an error at any operation of a batch leaves the same weights, and what cannot be divided is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import signal
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import nbguard
from nbguard.errors import NbguardError
from tests.survive.planted import MESSAGE, Planted, TooLarge, every_place, largest_difference, net
from tests.thorough import examples, spread


@cache
def xs() -> Any:
    """Return the inputs."""
    return torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))


@cache
def ys() -> Any:
    """Return the targets."""
    return torch.arange(24).reshape(3, 8) % 4


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy": cross_entropy,
    "weighted": lambda p, y: cross_entropy(p, y, weight=torch.tensor([1.0, 5.0, 0.1, 2.0])),
    "sum": lambda p, y: cross_entropy(p, y, reduction="sum"),
    "contrastive": lambda p, y: cross_entropy(p @ p.T / len(p), torch.arange(len(p))),
}


def _fit(
    at: int = 0,
    *,
    loss: str = "cross entropy",
    accumulates: bool = False,
    as_function: bool = False,
    items: int | None = None,
    half: bool = False,
) -> tuple[Any, Planted]:
    model, planted = net(), Planted(at)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[Any] = []

    def step(x: Any, y: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = LOSSES[loss](model(x).float(), y)
        found.backward()
        losses.append(found.detach())

    guard = nbguard.survive(model, optimizer, items=items)
    step = guard(step) if as_function else step
    torch.manual_seed(3)
    with guard, planted:
        for number, (x, y) in enumerate(zip(xs(), ys(), strict=True)):
            planted.is_armed = number == 1
            step(x, y)
            planted.is_armed = False
            if number == 2 or not accumulates:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 0)
    assert "forward" not in vars(model)
    state = model.state_dict(), optimizer.state_dict()["state"], losses, torch.get_rng_state()
    return (state, guard.changes), planted


@pytest.mark.parametrize(("loss", "accumulates"), spread([(loss, other) for loss in LOSSES for other in (False, True)], 5))
def test_an_error_anywhere_in_a_step_changes_nothing(loss: str, accumulates: bool) -> None:
    (plain, nothing), _ = _fit(loss=loss, accumulates=accumulates)
    assert not nothing

    def run(at: int) -> Planted:
        (state, changes), planted = _fit(at, loss=loss, accumulates=accumulates, as_function=True)
        assert largest_difference(plain, state) <= 1e-6
        assert [(change.size, change.pieces, change.refusal) for change in changes] == [(4, 2, "")] * planted.has_raised
        return planted

    assert every_place(run) > 10


def test_a_bare_loop_survives_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    (plain, _), _ = _fit()
    outcomes = []

    def run(at: int) -> Planted:
        planted = Planted()
        try:
            (state, changes), planted = _fit(at)
        except torch.OutOfMemoryError:
            outcomes.append("refused")
            planted.has_raised = True
            return planted
        assert largest_difference(plain, state) <= 1e-6
        outcomes.append("survived" if changes else "")
        return planted

    with torch.random.fork_rng():
        count = every_place(run, 40)

    assert count > 12
    assert outcomes[:4] == ["survived"] * 4, "in the model's call"
    assert set(outcomes[4:7]) == {"refused"}, "the loss is in no function"
    assert outcomes[count - 1] == "survived", "in the model's backward pass"
    assert "2 pieces of 4 items" in capsys.readouterr().out


@pytest.mark.parametrize("as_function", [False, True])
def test_an_error_that_was_survived_keeps_nothing(as_function: bool) -> None:
    """Not even until the next collection: the frames of its traceback lead to the batch and to the graph that failed."""

    def run(at: int) -> Planted:
        model, planted = net(), Planted(at)
        guard = nbguard.survive(model, torch.optim.SGD(model.parameters(), lr=0.01))
        x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
        kept = [weakref.ref(x)]

        def step(x: Any, y: Any) -> None:
            loss = cross_entropy(model(x), y)
            kept.append(weakref.ref(loss))
            loss.backward()

        step = guard(step) if as_function else step
        with suppress(torch.OutOfMemoryError), guard, planted:  # a bare loop does not survive its loss
            planted.is_armed = True
            step(x, y)
        if any(not change.refusal for change in guard.changes):
            del x
            assert [ref() for ref in kept] == [None] * len(kept), at
        return planted

    gc.disable()
    try:
        assert every_place(run, 60) > 10
    finally:
        gc.enable()


def test_a_step_as_a_function_remembers_its_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    guard = nbguard.survive(model)
    step = guard(lambda x, y: cross_entropy(model(x), y).backward())

    with TooLarge(4):
        for x, y in zip(xs(), ys(), strict=True):
            step(x, y)

    assert [change.size for change in guard.changes] == [4]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_bits_are_those_of_a_run_in_pieces_from_the_start() -> None:
    for half in (False, True):
        (whole, _), _ = _fit(items=4, half=half)
        for at in (2, 9, 13):
            model, other = net(), net()
            for each, planted in ((model, Planted(at)), (other, Planted())):
                guard = nbguard.survive(each, items=4 if each is other else None)
                step = guard(lambda each=each, half=half: _half_step(each, half=half))
                with guard, planted:
                    planted.is_armed = True
                    step()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
        assert len(whole) == 4


def _half_step(model: Any, *, half: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = cross_entropy(model(xs()[0]).float(), ys()[0])
    loss.backward()
    assert not torch.is_autocast_enabled("cpu")


@settings(max_examples=examples(6), deadline=None)
@given(st.data())
def test_random_nets(data: st.DataObject) -> None:
    """Random layers, sizes, errors and numbers of pieces: gradients are equal, and memory of a size is kept."""
    width, depth = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    count, rows = data.draw(st.integers(2, 17)), data.draw(st.integers(2, 17))
    kinds = data.draw(st.lists(st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.Identity]), min_size=depth, max_size=depth))
    layers = [layer for kind in kinds for layer in (nn.Linear(width, width), kind(), nn.LayerNorm(width))]
    model = nn.Sequential(*layers).double()
    x = torch.randn(count, width, dtype=torch.double)
    model(x).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    guard = nbguard.survive(model)
    with guard, TooLarge(rows):
        model(x).square().mean().backward()
        with torch.no_grad():
            model(x)

    assert largest_difference(plain, [parameter.grad for parameter in model.parameters()]) <= 1e-12
    assert all(change.size <= rows and not change.refusal for change in guard.changes[-1:])
    assert bool(guard.changes) is (count > rows)


class _Stateful(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(6, 4), torch.zeros(4)

    def forward(self, x: Any) -> Any:
        out = self.layer(x) + self.hidden
        self.hidden = out.detach().mean(0)
        return out


class _Counting(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return self.layer(x)


class _Of(nn.Module):  # type: ignore[misc]
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(6, 4), change

    def forward(self, x: Any) -> Any:
        return self.change(self.layer(x))


def _compiled() -> nn.Module:
    model = nn.Linear(6, 4)
    model._compiled_call_impl = model._call_impl
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "piecewise_batch_norm=True"),
    "instance norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.InstanceNorm1d(4, track_running_stats=True)), "InstanceNorm1d"),
    "state": (_Stateful, "`hidden`"),
    "buffer": (_Counting, "`seen`"),
    "scalar": (lambda: _Of(lambda out: out.mean()), "lead with the batch"),
    "turned": (lambda: _Of(lambda out: out.T), "lead with the batch"),
    "object": (lambda: _Of(lambda out: (out, object())), "`object`"),
    "mixed": (lambda: _Of(lambda out: out - out.mean(0)), "other items"),
    "causal": (lambda: _Of(lambda out: out.cumsum(0)), "other items"),
    "compiled": (_compiled, "compiled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_the_error_and_say_why(case: str) -> None:
    make, reason = REFUSED[case]
    model = make()
    guard = nbguard.survive(model)
    before = copy.deepcopy(model.state_dict())

    def fails() -> None:
        with guard, TooLarge(4):
            model(xs()[0])

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fails()

    assert raised.value.args == (MESSAGE,)
    assert any(entry.frame.code.name == "__torch_dispatch__" for entry in raised.traceback), "its own traceback"
    (change,) = guard.changes
    assert reason in change.refusal
    if case in ("batch norm", "scalar", "mixed"):
        assert largest_difference(before, model.state_dict()) == 0


def test_arguments_that_cannot_be_cut_are_refused() -> None:
    class Two(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Any, other: Any = None) -> Any:
            return self.layer(x)

    model = Two()
    for other, reason in ((torch.zeros(5, 2), "5, 8"), (object(), "`object`"), (torch.zeros(8).to_sparse(), "sparse")):
        with nbguard.survive(model) as guard, pytest.raises(torch.OutOfMemoryError), TooLarge(4):
            model(xs()[0], other)
        assert reason in guard.changes[0].refusal
    with nbguard.survive(model) as guard, TooLarge(4):
        model(xs()[0], other=torch.zeros(1, 9))
    assert guard.changes[0].pieces == 2, "a tensor that leads with 1 is common to all pieces"


def test_nothing_fits() -> None:
    model = net()
    with nbguard.survive(model) as guard, pytest.raises(torch.OutOfMemoryError), TooLarge(0):
        model(xs()[0])
    assert [bool(change.refusal) for change in guard.changes] == [True]
    with nbguard.survive(model) as guard:
        model(xs()[0])
    assert not guard.changes


def test_an_optimizer_that_runs_out_is_not_run_again() -> None:
    model = net()
    guard = nbguard.survive(model)

    @guard
    def step() -> None:
        model(xs()[0]).sum().backward()
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert "after the backward pass" in guard.changes[0].refusal


def test_batch_norm_with_consent() -> None:
    def fit(*, items: int | None, rows: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        with nbguard.survive(model, piecewise_batch_norm=True, items=items) as guard, TooLarge(rows):
            for x in xs():
                model(x).square().sum().backward()
        return (model.state_dict(), [parameter.grad for parameter in model.parameters()]), guard.changes

    whole, _ = fit(items=4, rows=8)
    survived, changes = fit(items=None, rows=4)

    assert largest_difference(whole, survived) == 0, "statistics are put back before the pieces, and updated once by each"
    assert changes[0].is_piecewise_norm
    assert "batch norms" in changes[0].sentence


def test_a_batch_norm_without_statistics_stays_as_it_was_set() -> None:
    """It takes those of its batch in evaluation, too."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with nbguard.survive(model, piecewise_batch_norm=True), TooLarge(4), pytest.raises(torch.OutOfMemoryError):
        model(xs()[0])
    assert not any(module.training for module in model.modules())


def test_random_numbers_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    with nbguard.survive(model) as guard, TooLarge(4):
        model(xs()[0]).sum().backward()
    assert guard.changes[0].draws
    assert "random numbers" in guard.changes[0].sentence


def test_other_uses_of_a_guarded_model() -> None:
    """Copies, pickles, signatures, gradients of other kinds and errors of other kinds are as without a guard."""
    model = net()
    with nbguard.survive(model, items=4) as guard:
        assert inspect.signature(model.forward) == inspect.signature(net().forward)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.forward.__self__ is other
        x = xs()[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        assert model[0].weight.grad is not None
        with pytest.raises(RuntimeError, match="mat1"):
            model(torch.zeros(8, 5))
        kept = [parameter.grad for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match="shape"):
            model(xs()[0]).backward(torch.zeros(3))
        assert all(parameter.grad is one for parameter, one in zip(model.parameters(), kept, strict=True))
    assert not guard.changes
    with pytest.raises(NbguardError):
        nbguard.survive(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NbguardError):
        nbguard.survive(model, items=0)


class _WithWeight(nn.Module):  # type: ignore[misc]
    """Returns a weight of its own along with its output, for a penalty in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Any) -> tuple[Any, Any]:
        return self.inner(x), self.inner[0].weight


def test_an_output_that_is_a_weight() -> None:
    model = _WithWeight()
    with nbguard.survive(model) as guard:
        output, weight = model(xs()[0])
        (output.sum() + weight.sum()).backward()
        assert not guard.changes
        with Planted(1) as planted:
            output, weight = model(xs()[0])
            loss = output.sum() + weight.sum()
            planted.is_armed = True
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
    assert [change.refusal for change in guard.changes] == [
        "the loss cannot be computed again outside of a function that is given to `survive`"
    ]


def test_a_hook_of_the_users_on_an_output_counts_once() -> None:
    """The gradient that the model's backward pass gets when it runs again is the one that the hook has made."""

    def gradients(at: int) -> tuple[list[Any], Planted]:
        model, planted = net(), Planted(at)
        with nbguard.survive(model), planted:
            output = model(xs()[0])
            output.register_hook(lambda gradient: 2 * gradient)
            loss = output.square().sum()
            planted.is_armed = True
            loss.backward()
        return [parameter.grad for parameter in model.parameters()], planted

    plain, _ = gradients(0)
    survived = 0
    for at in range(1, 40):
        try:
            found, planted = gradients(at)
        except torch.OutOfMemoryError:
            continue
        survived += planted.has_raised
        assert largest_difference(plain, found) <= 1e-6
    assert survived > 3


def test_a_plain_loop_imports_no_fastai() -> None:
    code = "import sys, torch, nbguard; nbguard.survive(torch.nn.Linear(1, 1)); print('fastai' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout

    assert printed == "False\n"


def _lines_of(run: Callable[[], Any], at: int = 0) -> int:
    """Run something, with a SIGINT at the line of that number in the guard's own going in and out; return their number."""
    count = 0

    def lines(frame: types.FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGINT)
        return lines

    def calls(frame: types.FrameType, _event: str, _: object) -> Any:
        code = frame.f_code
        is_own = (
            code.co_name in ("_put", "_take_out", "start", "stop", "put", "remove") and "/training/survive/" in code.co_filename
        )
        return lines if is_own else None

    former = sys.gettrace()
    sys.settrace(calls)
    try:
        run()
    finally:
        sys.settrace(former)
    return count


def test_an_interrupt_while_a_guard_goes_in_or_out_leaves_nothing_in_place() -> None:
    model, backward = net(), torch.autograd.backward
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def train() -> None:
        with nbguard.survive(model):
            model(xs()[0]).sum().backward()

    try:
        for at in range(1, _lines_of(train) + 1):
            with pytest.raises(KeyboardInterrupt):
                _lines_of(train, at)
            assert torch.autograd.backward is backward
            assert "forward" not in vars(model)
    finally:
        signal.signal(signal.SIGINT, handler)
