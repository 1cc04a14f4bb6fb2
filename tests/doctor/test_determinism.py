"""Determinism, tried: planted faults are named, clean models raise no alarm, and nothing of the user's changes."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from tests.doctor import learners, planted
from tests.doctor.untouched import fingerprint
from tests.thorough import left_out_by_ci

MSE = nn.functional.mse_loss


def diagnosed(model: Any, batch: Any = None, **options: Any) -> nbguard.training.doctor.analysis.diagnosis.Diagnosis:
    return nbguard.diagnose(model, batch, environment=False, export=False, **options)


@pytest.mark.parametrize("fault", planted.FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    kind, expected = planted.FAULTS[fault]
    model, batch = planted.faulty(kind), planted.batch()
    before = fingerprint(model)

    diagnosis = diagnosed(model, batch, loss_func=MSE, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    alarms = [finding for finding in diagnosis.findings if finding.severity != "note"]
    assert len(alarms) == 1, alarms
    assert expected.named in alarms[0].what
    assert alarms[0].severity == expected.severity
    assert expected.evidence in alarms[0].evidence
    assert alarms[0].command
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", learners.CLEAN)
def test_a_clean_model_raises_no_alarm_and_stays_as_it_is(name: str) -> None:
    subject, batch, loss = learners.make(name)
    learn = subject if hasattr(subject, "dls") else None
    model = subject.model if learn is not None else subject
    if learn is None:
        model.eval()
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    before = fingerprint(model, learn)

    diagnosis = diagnosed(subject, batch, loss_func=loss)
    assert [finding for finding in diagnosis.findings if finding.severity != "note"] == []
    assert {check.state for check in diagnosis.checks if check.name in ("one step", "operations", "hidden state")} == {"ok"}
    after = fingerprint(model, learn)
    assert {key for key in before if before[key] != after[key]} == set()


@pytest.mark.parametrize("fails", ["nowhere", "in the loss", "in the backward pass"])
def test_no_tensor_of_a_trial_outlives_it(fails: str) -> None:
    """A hook that led to its own tensor kept all activations and the copies of the parameters, and no collection freed them."""

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("no gradient")

    def loss(outputs: Any, targets: Any) -> Any:
        if fails == "in the loss":
            raise RuntimeError("no loss")
        return MSE(Refuses.apply(outputs) if fails == "in the backward pass" else outputs, targets)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = (torch.randn(4, 8), torch.randn(4, 1))
    diagnosed(model, batch, loss_func=loss)
    before = tensors()
    diagnosed(model, batch, loss_func=loss)
    assert tensors() == before


def test_a_fit_goes_on_as_if_nothing_had_been_tried() -> None:
    """Two copies of a Learner are fitted, one of them diagnosed before and in the middle: the same bits."""
    import fastai.callback.progress  # noqa: F401 - it gives Learners their no_bar

    results = []
    for is_diagnosed in (False, True):
        learn = learners.make("tabular")[0]
        torch.manual_seed(5)
        for _ in range(2):
            if is_diagnosed:
                diagnosed(learn)
            with learn.no_bar(), learn.no_logging():
                learn.fit(1)
        results.append({name: tensor.clone() for name, tensor in learn.model.state_dict().items()})

    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_graph_that_the_user_keeps_still_runs_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loss = model(torch.randn(8, 4)).sum()

    diagnosed(model, torch.randn(8, 4))
    loss.backward()
    assert model[0].weight.grad is not None


def test_the_optimizer_is_tried_and_stays() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())

    diagnosis = diagnosed(model, torch.randn(8, 4), optimizer=optimizer)
    after = optimizer.state_dict()
    assert all(torch.equal(before["state"][0][key], after["state"][0][key]) for key in before["state"][0])
    assert not any("no step of the optimizer" in note for note in diagnosis.notes)


class _RandomSteps(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(planted.noise(parameter.grad), alpha=-0.1)


def test_a_fault_of_the_optimizer_is_named() -> None:
    model = nn.Linear(4, 2)

    diagnosis = diagnosed(model, torch.randn(8, 4), optimizer=_RandomSteps(model.parameters(), lr=0.1))
    assert "first in the optimizer's step" in diagnosis.findings[0].what


def test_a_fault_of_the_loss_is_named() -> None:
    model = nn.Linear(4, 2)

    def loss(predictions: Any, targets: Any) -> Any:
        return planted.noise(MSE(predictions, targets))

    diagnosis = diagnosed(model, (torch.randn(8, 4), torch.randn(8, 2)), loss_func=loss)
    assert "first in the loss function" in diagnosis.findings[0].what


@left_out_by_ci
@pytest.mark.skipif(torch.get_num_threads() > 64, reason="needs a thread of its own")
def test_threads_that_race_are_named_and_cured() -> None:
    """Scattered gradients that several threads add up: on CPUs PyTorch's own nondeterminism, which its mode cures."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    class Rows(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[torch.arange(x.shape[0] * 4) % 7]

    model = nn.Sequential(nn.Linear(64, 64), Rows(), nn.Linear(64, 1))
    try:
        findings = []
        for _ in range(5):  # a race may be won three times in a row
            findings = [f for f in diagnosed(model, torch.randn(20_000, 64)).findings if f.severity == "problem"]
            if findings:
                break
        if not findings:
            pytest.skip("the threads of this machine did not race")
        assert "`model[1]` in the backward pass" in findings[0].what
        assert "in PyTorch's deterministic mode" in findings[0].evidence or "with one thread" in findings[0].evidence
    finally:
        torch.set_num_threads(before)


UNUSABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "shape": (
        lambda: nn.Linear(4, 2),
        lambda: torch.randn(8, 3),
        "one step of Linear cannot be run: RuntimeError: (addmm: )?mat1 and mat2 shapes",
    ),
    "no batch": (lambda: nn.Linear(4, 2), lambda: None, "a Linear has no loader: give a batch"),
    "text": (lambda: nn.Linear(4, 2), lambda: "words", "this str is not a batch"),
    "empty": (lambda: nn.Linear(4, 2), lambda: (), "the batch is empty"),
    "lazy": (lambda: nn.LazyLinear(2), lambda: torch.randn(8, 3), "weight has no shape yet: call the model on one batch first"),
    "whole numbers": (
        nn.Flatten,
        lambda: torch.ones(3, 2, dtype=torch.long),
        "the model returns no tensor of floating point numbers",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_cannot_be_tried_is_not_checked_and_unchanged(kind: str) -> None:
    make_model, make_batch, reason = UNUSABLE[kind]
    model, batch = make_model(), make_batch()
    before = None if isinstance(model, nn.LazyLinear) else fingerprint(model)

    diagnosis = diagnosed(model, batch)
    step = next(check for check in diagnosis.checks if check.name == "one step")
    assert step.state == "not checked"
    assert re.search(reason, step.evidence)
    assert before is None or fingerprint(model) == before


class _Reversible(torch.autograd.Function):
    """A layer whose backward pass calls the module again, as reversible layers and checkpoints do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Any, *_parameters: Any) -> Any:
        ctx.module, ctx.x = module, x.detach()
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.module(x).backward(gradient)  # writes into the parameters' own gradients
        return None, x.grad, *(None for _ in ctx.module.parameters())


class _Again(nn.Module):
    def __init__(self, through: str) -> None:
        super().__init__()
        self.layer, self.through = nn.Linear(4, 4), through

    def forward(self, x: Any) -> Any:
        if self.through == "reversible":
            return _Reversible.apply(self.layer, x, *self.layer.parameters())
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.layer, x, use_reentrant=self.through == "reentrant")


@pytest.mark.parametrize("through", ["reversible", "reentrant", "not reentrant"])
def test_a_backward_pass_that_calls_a_layer_again_writes_into_no_gradient_of_the_users(through: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Again(through), nn.Linear(4, 2))
    model[1].layer.weight.grad = torch.ones(4, 4)
    batch = torch.randn(8, 4)
    before = fingerprint(model)

    diagnosis = diagnosed(model, batch)
    assert [check.state for check in diagnosis.checks][:3] == ["ok"] * 3
    assert fingerprint(model) == before


def test_a_loss_with_parameters_keeps_its_gradients() -> None:
    loss = nn.Bilinear(2, 2, 1)
    loss.weight.grad = torch.ones_like(loss.weight)
    model, batch = nn.Linear(4, 2), (torch.randn(8, 4), torch.randn(8, 2))
    before = fingerprint(loss)

    diagnosed(model, batch, loss_func=lambda *both: loss(*both).sum())
    assert fingerprint(loss) == before


class _HooksItself(nn.Module):
    """Registers hooks in its first call, and changes the order of others, as Transformers' models do to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.has_hooks = False

    def forward(self, x: Any) -> Any:
        if not self.has_hooks:
            self.layer.register_forward_hook(lambda *_: None, prepend=True)
            self.has_hooks = True
        return self.layer(x)


def test_hooks_that_a_model_registers_itself_leave_its_dicts_whole() -> None:
    model = _HooksItself()
    kept = [model.layer.register_forward_hook(lambda *_: None) for _ in range(2)]
    batch = torch.randn(8, 4)
    before = fingerprint(model)

    diagnosed(model, batch)
    assert fingerprint(model) == before
    assert list(model.layer._forward_hooks) == [handle.id for handle in kept]
    assert len(list(model.layer._forward_hooks.values())) == 2  # the list of an OrderedDict agrees with its dict
    model(torch.randn(8, 4))
    assert len(model.layer._forward_hooks.values()) == 3


def test_a_compiled_model_is_tried_as_it_was_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), planted.Forward(), nn.Linear(4, 2))
    compiled, batch = torch.compile(model, backend="eager"), torch.randn(8, 4)
    before = fingerprint(model)

    diagnosis = diagnosed(compiled, batch)
    assert "`model[1]` in the forward pass" in diagnosis.findings[0].what
    assert "compiled parts ran without torch.compile" in diagnosis.notes
    assert fingerprint(model) == before


def test_a_loader_that_fastai_has_not_looked_at_yet_stays_so() -> None:
    from fastai.data.core import DataLoaders, TfmdDL
    from fastai.learner import Learner

    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    loaders = DataLoaders(TfmdDL(data, bs=4, num_workers=0, shuffle=True), TfmdDL(data, bs=4, num_workers=0))
    learn = Learner(loaders, nn.Linear(4, 2), loss_func=MSE)
    before = fingerprint(learn.model, learn)

    assert [check.state for check in diagnosed(learn).checks][:3] == ["ok"] * 3
    after = fingerprint(learn.model, learn)
    assert {key for key in before if before[key] != after[key]} == set()
