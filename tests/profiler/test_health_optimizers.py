"""How optimizers are used in real loops: eps in float16, gradients that are not cleared, steps that are not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.optimizer_facts import OptimizersFacts, faster_step, optimizer_findings
from nbguard.training.profiler.checks.optimizers import OptimizerWatch
from tests.profiler.recording import recording


def findings(
    make: Callable[..., Any], clear: Callable[[Any, nn.Module], Any], model: nn.Module | None = None, step: bool = True
) -> tuple[list[FitFinding], OptimizersFacts]:
    watch, model = OptimizerWatch(), model or nn.Sequential(nn.Linear(512, 600), nn.Linear(600, 1))
    optimizer = make(model.parameters())
    dtype = next(model.parameters()).dtype
    with recording(watch):
        for _ in range(8):
            loss = model(torch.ones(2, 512, dtype=dtype)).mean()
            clear(optimizer, model)
            loss.backward()
            if step:
                optimizer.step()
    return list(optimizer_findings(watch.observe())), watch.observe()


def by_zero_grad(optimizer: Any, model: nn.Module) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("eps", "settings", "is_bad"),
    [(1e-8, {}, True), (2.0**-25, {}, True), (1e-5, {}, False), (1e-8, {"fused": True}, False), (0.0, {}, False)],
)
def test_eps_that_is_zero_in_the_parameters_dtype(eps: float, settings: dict[str, Any], is_bad: bool) -> None:
    found, _ = findings(lambda p: torch.optim.Adam(p, lr=0, eps=eps, **settings), by_zero_grad, nn.Linear(512, 1).half())

    assert [f.kind for f in found] == ["eps"] * is_bad
    if is_bad:
        assert f"eps={eps:g} of Adam" in found[0].what
        assert "2 float16 parameters" in found[0].evidence


def test_eps_matters_in_float16_only() -> None:
    assert findings(lambda p: torch.optim.Adam(p, eps=1e-8), by_zero_grad)[0] == []
    assert findings(lambda p: torch.optim.Adam(p, eps=1e-8), by_zero_grad, nn.Linear(512, 1).bfloat16())[0] == []


def test_gradients_of_embeddings_may_be_sparse() -> None:
    watch, words = OptimizerWatch(), nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(words.parameters())
    with recording(watch):
        for _ in range(4):
            optimizer.zero_grad()
            words(torch.arange(3)).mean().backward()
            optimizer.step()

    assert optimizer_findings(watch.observe()) == ()
    assert watch.observe().optimizers[0].steps == 4


def test_eps_of_fastais_own_optimizers_is_seen() -> None:
    from fastai.vision.all import Adam, DataLoader, DataLoaders, Learner

    watch = OptimizerWatch()
    items = [(torch.ones(4).half(), torch.ones(1).half())] * 16
    loader = DataLoader(items, bs=4)
    learner = Learner(
        DataLoaders(loader, loader), nn.Linear(4, 1).half(), loss_func=lambda out, y: (out.float() - y).square().mean()
    )
    learner.opt_func = lambda params, lr: Adam(params, lr=lr, eps=1e-8)
    with recording(watch), learner.no_bar(), learner.no_logging():
        learner.fit(1, 0.0)
    (one,) = watch.observe().optimizers
    assert (one.is_learners, one.steps, one.cleared, one.gradient_bytes) == (True, 4, 4, 10)
    assert [f.kind for f in optimizer_findings(watch.observe())] == ["eps"]


def test_gradients_that_nothing_clears_pile_up() -> None:
    found, facts = findings(lambda p: torch.optim.SGD(p, 0.01), lambda *_: None)

    assert [(f.kind, f.severity) for f in found] == [("zero_grad", "problem")]
    assert found[0].nbytes == facts.optimizers[0].gradient_bytes == (512 * 600 + 600 + 600 + 1) * 4


def test_gradients_pile_up_also_where_the_step_writes_to_them() -> None:
    found, _ = findings(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, foreach=True), lambda *_: None)

    assert [(f.kind, f.severity) for f in found] == [("zero_grad", "problem")]


def a_part_is_kept(optimizer: Any, model: nn.Module) -> None:
    """Momentum by gradients that stay in part, as fast.ai's course has it in its notebook on the learner."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 0.85


def by_hand(optimizer: Any, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def by_hand_in_place(optimizer: Any, model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


@pytest.mark.parametrize("clear", [by_zero_grad, by_hand, a_part_is_kept, lambda optimizer, model: model.zero_grad()])
def test_however_they_are_cleared_is_right(clear: Callable[..., Any]) -> None:
    assert findings(lambda p: torch.optim.SGD(p, 0.01), clear)[0] == []


def test_cleared_in_place_by_hand_before_the_loss_is_right() -> None:
    watch, model = OptimizerWatch(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with recording(watch):
        for _ in range(8):
            by_hand_in_place(optimizer, model)
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    assert optimizer_findings(watch.observe()) == ()


def test_zero_grad_in_place_says_what_stays() -> None:
    (found,), facts = findings(lambda p: torch.optim.SGD(p, 0.01), lambda o, _: o.zero_grad(set_to_none=False))

    assert (found.kind, found.severity, found.nbytes) == ("zero_grad", "advice", facts.optimizers[0].gradient_bytes)
    assert "1.18 MiB" in found.evidence


def test_an_optimizer_that_never_steps() -> None:
    (found,), _ = findings(lambda p: torch.optim.SGD(p, 0.01), by_zero_grad, step=False)

    assert (found.kind, found.severity) == ("step", "problem")
    assert "8 backward passes" in found.evidence


def test_parameters_without_gradients_are_noted_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(512, 1), nn.Linear(512, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    (found,), _ = findings(lambda p: torch.optim.SGD(p, 0.01), by_zero_grad, Net())

    assert (found.kind, found.severity) == ("unused", "note")
    assert "`spare.weight`, `spare.bias`" in found.evidence


def test_a_library_that_steps_an_optimizer_for_each_parameter_has_its_own_way_to_one() -> None:
    """As `pyro.optim.Adam` does in `SVI.step`: nobody can hand it one optimizer of all parameters."""
    pyros: dict[str, Any] = {"__name__": "pyro.optim.optim"}
    exec("def step(optimizers):\n    for optimizer in optimizers: optimizer.step()", pyros)
    watch, model = OptimizerWatch(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizers = [torch.optim.Adam([parameter]) for parameter in model.parameters()]
    with recording(watch):
        for _ in range(4):
            model(torch.ones(2, 4)).mean().backward()
            pyros["step"](optimizers)
            model.zero_grad()

    (finding,) = optimizer_findings(watch.observe())

    assert finding.what == "10 optimizers step in each batch"
    assert "torch.optim.Adam(elbo.parameters())" in finding.change


def test_a_closure_clears_and_computes_inside_the_step() -> None:
    watch, model = OptimizerWatch(), nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with recording(watch):
        for _ in range(5):
            optimizer.step(closure)
    assert optimizer_findings(watch.observe()) == ()


@pytest.mark.parametrize(
    ("make", "severities"),
    [
        (torch.optim.Adam, ["problem"]),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), ["problem"]),
        (lambda p: torch.optim.SGD(p, 0.1), ["note"]),
    ],
    ids=["Adam", "momentum", "plain"],
)
def test_an_optimizer_that_is_made_anew_in_each_batch_is_not_many(make: Any, severities: list[str]) -> None:  # seeds3.md W11
    watch, model = OptimizerWatch(), nn.Linear(8, 4)
    with recording(watch):
        for _ in range(65):
            optimizer = make(model.parameters())
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = optimizer_findings(watch.observe())
    assert [(f.kind, f.severity) for f in found] == [("renewed", severity) for severity in severities]
    assert ("is lost each time" in found[0].what) == (severities == ["problem"])


@pytest.mark.parametrize("steps", [1, 4])
def test_models_that_are_made_anew_have_optimizers_of_their_own(steps: int) -> None:
    """As where each task of a meta-learner, or each fold, trains a copy."""
    watch, model = OptimizerWatch(), nn.Linear(8, 4)
    with recording(watch):
        for _ in range(16):
            task = copy.deepcopy(model)
            optimizer = torch.optim.Adam(task.parameters())
            for _ in range(steps):
                optimizer.zero_grad()
                task(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()

    assert not {"renewed", "optimizers"} & {f.kind for f in optimizer_findings(watch.observe())}


def step_of(make: Callable[..., Any]) -> str:
    """Return the advice on the steps of an optimizer."""
    return faster_step(findings(make, by_zero_grad)[1])


def test_a_faster_step_is_one_that_the_optimizer_can_take() -> None:  # seeds3.md W16
    assert step_of(torch.optim.AdamW) == "`AdamW(…, fused=True)` takes fewer calls for a step"
    assert step_of(lambda p: torch.optim.SGD(p, 0.1)) == "`SGD(…, fused=True)` takes fewer calls for a step"
    assert step_of(lambda p: torch.optim.Adam(p, fused=True)) == ""
    assert step_of(torch.optim.Adadelta) == ""  # it has no fused step, and steps many parameters at once anyway
    assert step_of(lambda p: torch.optim.Adadelta(p, foreach=False)).startswith("`Adadelta(…, foreach=True)`")

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            pass

    assert step_of(Own) == ""


def test_a_faster_step_for_a_learner_is_a_line_that_runs() -> None:
    from functools import partial

    from fastai.vision.all import SGD, Adam, OptimWrapper, RAdam

    from tests.profiler.loops import learner

    def line_of(opt_func: Any) -> str:
        learn, watch = learner(), OptimizerWatch()
        learn.opt_func = opt_func
        with recording(watch), learn.no_logging():
            learn.fit(1, 1e-2)
        return faster_step(watch.observe())

    said = line_of(Adam)
    assert said.startswith("`opt_func=partial(OptimWrapper, opt=torch.optim.AdamW, fused=True)`")
    assert "torch.optim.SGD" in line_of(SGD)
    assert line_of(RAdam) == ""  # torch's has no fused step
    assert "torch.optim.Adam, fused" in line_of(partial(OptimWrapper, opt=torch.optim.Adam))

    line = said.split("`")[1].removeprefix("opt_func=")
    fused = eval(line, {"partial": partial, "OptimWrapper": OptimWrapper, "torch": torch})
    assert line_of(fused) == ""
