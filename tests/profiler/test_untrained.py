"""Training that does not train: each fault comes first in the report, its cure is silent and learns, and twins are silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from tests.profiler.recording import generators, seed

Made = tuple[nn.Module, Any]  # a model and its optimizer
KINDS = ("not trained", "frozen", "zero_grad", "step", "renewed", "unused gradients", "loss input")
"""Kinds of findings on training."""


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 2000, bias=False), nn.ReLU(), nn.Linear(2000, 4, bias=False))


def data(count: int = 64) -> TensorDataset:
    x = torch.randn(count, 4)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(
    model: nn.Module, optimizer: Any, *, epochs: int = 4, loss_of: Any = None, each: Any = None, every: Any = None
) -> float:
    """Train in a plain loop; return the last loss over the whole data."""
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    loss_of = loss_of or nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            if each is not None:
                each()
        if every is not None:
            every()
    x, y = loader.dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def profiled(fit: Callable[[], Any]) -> tuple[FitReport, list[str]]:
    """Return the report, and the findings on training: `kind: what`."""
    seed()
    with profile_fit(show=False) as profile:
        fit()
    report = profile.report
    assert report.notes == ()
    return report, [f"{f.kind}: {f.what}" for f in report.findings if f.kind in KINDS]


def profiled_result(fit: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of a fit that is profiled, and the generators after it."""
    seed()
    with profile_fit(show=False):
        result = fit()
    return result, generators()


def first_of(fit: Callable[[], Any], kind: str = "not trained") -> str:
    """Return the first sentence of a fit that has one problem, which is a finding on training; a profile draws nothing."""
    report, found = profiled(fit)
    (problem,) = [f for f in report.findings if f.severity == "problem"]
    assert (problem.kind, problem.concern) == (kind, "result"), found
    assert report.first[0] == f"{problem.what}: {problem.change}"
    seed()
    trained = fit()
    bare = generators()
    assert profiled_result(fit) == (trained, bare)
    return report.first[0]


def is_silent(fit: Callable[[], Any]) -> bool:
    report, found = profiled(fit)
    assert found == []
    return not [f for f in report.findings if f.severity == "problem"]


ADAM = torch.optim.Adam


def new_head(order: str, head: Callable[[], nn.Module] = lambda: nn.Linear(8, 2), *, freezes: bool = False) -> Made:
    model, optimizer = body(), None
    if freezes:
        model.requires_grad_(False)[2].requires_grad_(True)
    for part in order:
        if part == "o":
            optimizer = ADAM((p for p in model.parameters() if p.requires_grad), 1e-2)
        else:
            model[2] = head()
    return model, optimizer


def test_a_head_that_was_replaced_after_the_optimizer_was_made() -> None:
    found = first_of(lambda: train(*new_head("oh", freezes=True)))
    assert "none of its 2 parameters is in a model that ran: make the optimizer after the model" in found
    assert is_silent(lambda: train(*new_head("ho", freezes=True)))  # the cure


def test_a_head_that_was_replaced_while_the_body_is_trained() -> None:
    found = first_of(lambda: train(*new_head("oh")))
    assert "`2.weight`, `2.bias` are not trained: the optimizer was made before that layer" in found
    assert is_silent(lambda: train(*new_head("ho")))


def test_an_optimizer_of_an_earlier_model() -> None:
    def fit() -> float:
        optimizer = ADAM(body().parameters(), 1e-2)
        return train(body(), optimizer)

    assert "none of its 4 parameters is in a model that ran" in first_of(fit)
    assert is_silent(lambda: train(model := body(), ADAM(model.parameters(), 1e-2)))


def test_an_optimizer_that_trained_an_earlier_model() -> None:
    """Its parameters had gradients then, and a state of it says so; in this fit they had none."""
    optimizer = ADAM((earlier := body()).parameters(), 1e-2)
    train(earlier, optimizer)

    report, _ = profiled(lambda: train(body(), optimizer))

    (problem,) = [finding for finding in report.findings if finding.severity == "problem"]
    assert "none of them had a gradient at any step of this fit; gradients reached `0.weight`" in problem.evidence


def copied(model: nn.Sequential) -> nn.Sequential:
    return copy.deepcopy(model)


def with_a_new_head(model: nn.Sequential) -> nn.Sequential:
    model[2] = nn.Linear(8, 2)
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (copied, "Adam trains nothing: none of its 4 parameters is in a model that ran"),
        (with_a_new_head, "`2.weight`, `2.bias` are not trained: the optimizer was made before that layer"),
    ],
)
def test_a_second_stage_whose_optimizer_is_that_of_the_first(change: Callable[..., Any], said: str) -> None:
    def fit(*, well: bool) -> float:
        model = body()
        optimizer = ADAM(model.parameters(), 1e-2)
        train(model, optimizer, epochs=2)
        model = change(model)
        return train(model, ADAM(model.parameters(), 1e-2) if well else optimizer, epochs=2)

    found = first_of(lambda: fit(well=False))
    assert said in found
    assert "make the optimizer after the " in found
    assert is_silent(lambda: fit(well=True))  # the first stage's optimizer is still there, and no longer steps


def test_an_optimizer_of_a_frozen_part_beside_one_that_trains() -> None:
    def fit(*, well: bool) -> Any:
        model, head = body().requires_grad_(False), nn.Linear(2, 2)
        optimizers = [ADAM(part.parameters(), 1e-2) for part in (model, head)]
        if well:
            model.requires_grad_(True)
        for x, y in DataLoader(data(256), batch_size=8):
            for each in optimizers:
                each.zero_grad()
            nn.functional.cross_entropy(head(model(x)), y).backward()
            for each in optimizers:
                each.step()

    report, found = profiled(lambda: fit(well=False))
    assert found == ["frozen: Adam trains nothing: 4 parameters, all frozen"]
    assert "`requires_grad_(True)`" in report.first[0]
    assert is_silent(lambda: fit(well=True))
    assert is_silent(lambda: train(*new_head("ho", freezes=True)))  # frozen on purpose: the optimizer has the head alone


class Detached(nn.Module):
    """A model whose graph is cut: its last layer is not the one that the optimizer has."""

    def __init__(self, cut: Callable[[Any], Any]) -> None:
        super().__init__()
        self.body, self.head, self.cut = nn.Linear(4, 8), nn.Linear(8, 2), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cut(self.body(x)).relu())


@pytest.mark.parametrize("cut", [lambda t: t.detach(), lambda t: t.data, lambda t: torch.from_numpy(t.detach().numpy())])
def test_a_graph_that_is_cut_between_the_model_and_the_loss(cut: Callable[[Any], Any]) -> None:
    def fit(cut: Callable[[Any], Any]) -> float:
        model = Detached(cut)
        return train(model, ADAM(model.body.parameters(), 1e-2))

    found = first_of(lambda: fit(cut))
    assert "none of its 2 parameters ever gets a gradient: look for `.detach()`" in found
    _, well = profiled(lambda: fit(lambda t: t))
    assert well == ["unused gradients: 2 parameters get gradients that no optimizer uses: `head.weight`, `head.bias`"]


def test_a_frozen_model_before_a_loss_that_has_parameters() -> None:
    class Margins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(out * self.scale, y)

    def fit(*, frozen: bool) -> float:
        model, loss_of = body().requires_grad_(not frozen), Margins()
        return train(model, ADAM(model.parameters(), 1e-2), loss_of=loss_of)

    assert "4 parameters, all frozen: `model.requires_grad_(True)`" in first_of(lambda: fit(frozen=True))
    assert is_silent(lambda: fit(frozen=False)) is True


def cleared_between(model: nn.Module, optimizer: Any, clear: Callable[[], Any]) -> None:
    for x, y in DataLoader(data(256), batch_size=8):
        nn.functional.cross_entropy(model(x), y).backward()
        clear()
        optimizer.step()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_gradients_that_are_cleared_before_the_step(keeps: bool, by_model: bool) -> None:
    def fit() -> None:
        model = body()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        cleared_between(model, optimizer, lambda: (model if by_model else optimizer).zero_grad(set_to_none=not keeps))

    assert "`optimizer.zero_grad()` before" in first_of(fit)


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 6, 8]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_that_steps_per_batch(make: Callable[[Any], Any]) -> None:
    def fit(where: str) -> float:
        model = body()
        optimizer = ADAM(model.parameters(), 1e-2)
        return train(model, optimizer, epochs=8, **{where: make(optimizer).step})

    found = first_of(lambda: fit("each"))
    assert "batches train nothing: `scheduler.step()` once per epoch" in found
    assert is_silent(lambda: fit("every"))


def test_a_plateau_schedule_that_steps_with_the_loss_of_each_batch() -> None:
    """It has a `step` of its own, as some of torch's schedulers have."""

    def fit(where: str) -> float:
        model = body()
        optimizer = ADAM(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.01, patience=1)
        return train(model, optimizer, epochs=8, **{where: lambda: schedule.step(1.0)})

    found = first_of(lambda: fit("each"))
    assert "batches train nothing: `scheduler.step()` once per epoch, or settings of `ReduceLROnPlateau`" in found


def cosine(optimizer: Any, batches: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)


def one_cycle(optimizer: Any, batches: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=batches)


def warm_up(optimizer: Any, batches: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(at / 10, (batches - at) / batches))


def restarts(optimizer: Any, batches: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, batches // 4)


@pytest.mark.parametrize("make", [cosine, one_cycle, warm_up, restarts])
def test_schedules_that_count_batches_and_end_at_nothing(make: Callable[[Any, int], Any]) -> None:
    def fit() -> float:
        model = body()
        optimizer = ADAM(model.parameters(), 1e-2)
        return train(model, optimizer, epochs=8, each=make(optimizer, 65).step)

    assert is_silent(fit)


def test_a_learning_rate_of_0() -> None:
    def fit(rate: float) -> float:
        model = body()
        return train(model, torch.optim.SGD(model.parameters(), rate))

    assert "its learning rate is 0: `SGD(…, lr=1e-3)`" in first_of(lambda: fit(0.0))
    assert is_silent(lambda: fit(1e-3))


def test_gradients_that_are_all_0() -> None:
    def fit(factor: float) -> float:
        model = body()
        loss_of = nn.CrossEntropyLoss()
        return train(model, torch.optim.SGD(model.parameters(), 0.1), loss_of=lambda out, y: factor * loss_of(out, y))

    assert "its steps change no value: look for gradients that are all 0" in first_of(lambda: fit(0.0))
    assert is_silent(lambda: fit(1.0))


def test_gradients_that_are_cleared_once_an_epoch() -> None:
    def fit(*, often: bool) -> None:
        model = body()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            for x, y in DataLoader(data(), batch_size=4):
                if often:
                    optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    assert "gradients pile up" in first_of(lambda: fit(often=False), "zero_grad")
    assert is_silent(lambda: fit(often=True))


def test_gradients_that_are_added_up_over_batches_are_healthy() -> None:
    def fit() -> None:
        model = body()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for number, (x, y) in enumerate(DataLoader(data(256), batch_size=4), 1):
            (nn.functional.cross_entropy(model(x), y) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert is_silent(fit)


def update(p: Any, by: str) -> None:
    if by == "data":
        p.data.sub_(0.1 * p.grad)
    elif by == "copy":
        p.data = p.data - 0.1 * p.grad
    else:
        with torch.no_grad():
            p -= 0.1 * p.grad


BY_HAND = pytest.mark.parametrize("by", ["data", "no_grad", "copy"])


@BY_HAND
def test_an_update_by_hand_is_training(by: str) -> None:
    def fit(*, updates: bool) -> None:
        model = body()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters() if updates else ():
                update(p, by)

    assert "SGD never steps" in first_of(lambda: fit(updates=False), "step")
    assert is_silent(lambda: fit(updates=True))


@BY_HAND
def test_an_update_by_hand_of_large_parameters_alone_is_training(by: str) -> None:
    """Some of their values are compared."""

    def fit(*, updates: bool) -> None:
        model = large()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters() if updates else ():
                update(p, by)

    assert "SGD never steps" in first_of(lambda: fit(updates=False), "step")
    assert is_silent(lambda: fit(updates=True))


def test_rows_of_a_large_parameter_that_are_updated_by_hand_are_training() -> None:
    """The values that are compared are hardly ever of these rows: nothing is said."""

    def fit() -> None:
        table = nn.Embedding(5000, 16)
        optimizer = torch.optim.SGD(table.parameters(), 0.1)
        for _ in range(40):
            rows = torch.randint(5000, (4,))
            optimizer.zero_grad()
            table(rows).square().sum().backward()
            table.weight.data[rows] -= 0.1 * table.weight.grad[rows]  # type: ignore[index]

    assert is_silent(fit)


def test_backward_passes_without_any_optimizer_are_said_where_nothing_changes() -> None:
    def fit(*, by: str = "", model: Any = body) -> None:
        model = model()
        for x, y in DataLoader(data(512), batch_size=8):
            nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters() if by else ():
                update(p, by)

    assert "no optimizer steps after the backward passes" in first_of(fit, "step")
    assert "no optimizer steps after the backward passes" in first_of(lambda: fit(model=large), "step")
    for by in ("data", "no_grad", "copy"):
        assert is_silent(lambda by=by: fit(by=by))  # type: ignore[misc]
        assert is_silent(lambda by=by: fit(by=by, model=large))  # type: ignore[misc]


def test_gradients_added_up_over_a_few_batches_without_a_step_yet_are_healthy() -> None:
    def fit() -> None:
        model = body()
        for x, y in DataLoader(data(), batch_size=4):
            (nn.functional.cross_entropy(model(x), y) / 16).backward()

    assert is_silent(fit)


def test_a_loop_by_autograd_grad_is_not_said_to_train_nothing() -> None:
    def fit(*, is_trained: bool = True) -> None:
        model = body()
        for x, y in DataLoader(data(), batch_size=8):
            with torch.set_grad_enabled(is_trained):
                loss = nn.functional.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters())) if is_trained else ()
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=False):
                    p -= 0.1 * gradient

    assert "only `torch.autograd.grad`" in profiled(fit)[0].first[0]
    assert profiled(lambda: fit(is_trained=False))[0].first[0].startswith("nothing was trained here")


@BY_HAND
def test_an_update_by_hand_beside_an_optimizer_of_other_parameters_is_healthy(by: str) -> None:
    def fit(*, updates: bool, model: Any = body) -> None:
        model = model()
        *others, weight = model.parameters()
        optimizer = torch.optim.SGD([weight], 0.1)
        for x, y in DataLoader(data(), batch_size=8):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for p in others if updates else ():
                update(p, by)
            optimizer.step()

    assert profiled(lambda: fit(updates=False))[1] == [
        "unused gradients: 3 parameters get gradients that no optimizer uses: `0.weight`, `0.bias`, `2.weight`"
    ]
    assert is_silent(lambda: fit(updates=True))
    assert profiled(lambda: fit(updates=False, model=large))[1] == [
        "unused gradients: 1 parameter gets gradients that no optimizer uses: `0.weight`"
    ]
    assert is_silent(lambda: fit(updates=True, model=large))


def test_two_optimizers_in_turn_are_healthy() -> None:
    """As in a GAN, whose critic gets gradients of the generator's loss, too."""

    def fit() -> None:
        maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        of_maker, of_critic = ADAM(maker.parameters()), ADAM(critic.parameters())
        for x, _ in DataLoader(data(256), batch_size=8):
            made = maker(torch.randn_like(x))
            of_critic.zero_grad()
            (critic(made.detach()).mean() - critic(x).mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            critic.requires_grad_(False)
            (-critic(made).mean()).backward()
            critic.requires_grad_(True)
            of_maker.step()

    assert is_silent(fit)


def test_lightnings_optimizers_in_a_manual_step_are_healthy() -> None:
    """They are of torch's classes by name only: `zero_grad` is torch's on the wrapper, and the optimizer inside steps."""
    wrapper = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer

    def fit(*, is_trained: bool = True) -> None:
        maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        of_maker, of_critic = wrapper(ADAM(maker.parameters())), wrapper(ADAM(critic.parameters()))
        for x, _ in DataLoader(data(), batch_size=8):
            (-critic(maker(x)).mean()).backward()
            if is_trained:
                of_maker.optimizer.step()  # as the wrapper's own does, by way of a Trainer
            of_maker.zero_grad()
            (critic(maker(x).detach()).mean() - critic(x).mean()).backward()
            of_critic.optimizer.step()
            of_critic.zero_grad()

    assert is_silent(fit)
    report, _ = profiled(lambda: fit(is_trained=False))
    assert [f.what for f in report.findings if f.severity == "problem"] == ["Adam never steps"]


def test_a_second_fit_whose_backward_passes_are_in_closures_is_healthy() -> None:
    """As in Lightning's loop, which clears the gradients between the steps: they are there after a step, not before it."""

    def fit(*, is_trained: bool = True) -> None:
        model = body()
        optimizer, loader = ADAM((model if is_trained else body()).parameters()), DataLoader(data(8), batch_size=8)
        for _ in range(3):
            for x, y in loader:

                def closure(x: Any = x, y: Any = y) -> Any:
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            optimizer.zero_grad()

    assert is_silent(lambda: [fit() for _ in range(3)])
    report, _ = profiled(lambda: fit(is_trained=False))
    assert [f.kind for f in report.findings if f.severity == "problem"] == ["not trained"]


def test_an_optimizer_of_a_tensor_that_no_model_has_is_healthy() -> None:
    def fit() -> None:
        picture, model = torch.randn(1, 4, requires_grad=True), body().requires_grad_(False)
        optimizer = ADAM([picture], 0.1)
        for _ in range(40):
            optimizer.zero_grad()
            model(picture).square().sum().backward()
            optimizer.step()

    assert is_silent(fit)


def test_a_part_that_rests_is_healthy() -> None:
    """An optimizer of a whole model of which only the encoder is called, beside a teacher that gets gradients."""

    def fit() -> None:
        model, teacher = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)}), nn.Linear(4, 2)
        optimizer = ADAM(model.parameters())
        for x, _ in DataLoader(data(256), batch_size=8):
            optimizer.zero_grad()
            (model["encoder"](x) - teacher(x)).square().mean().backward()
            optimizer.step()

    assert is_silent(fit)


def test_a_large_embedding_alone_is_healthy() -> None:
    def fit() -> None:
        words = nn.Embedding(5000, 8)
        optimizer = torch.optim.SGD(words.parameters(), 0.1)
        for at in range(40):
            optimizer.zero_grad()
            words(torch.tensor([at])).square().sum().backward()
            optimizer.step()

    assert is_silent(fit)


def test_a_learner_that_is_frozen_in_part_and_one_cycle_are_healthy() -> None:
    import fastai.callback.schedule  # noqa: F401 - it gives a Learner `fit_one_cycle`
    from fastai.basics import DataLoaders, Learner, params

    def fit() -> None:
        loader = DataLoader(data(256), batch_size=8)
        learn = Learner(
            DataLoaders(loader, loader),
            body(),
            loss_func=nn.CrossEntropyLoss(),
            splitter=lambda m: [params(m[0]), params(m[2])],
        )
        learn.remove_cbs([each for each in learn.cbs if each.name == "progress"])
        with learn.no_logging():
            learn.freeze()
            learn.fit_one_cycle(1)
            learn.unfreeze()
            learn.fit_one_cycle(1, slice(1e-5, 1e-3))

    assert is_silent(fit)
