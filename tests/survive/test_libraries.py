"""Fits of fastai, Transformers and Lightning that run out of memory in a batch, with the real loops of these libraries."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from tests.survive.planted import MESSAGE, Planted, TooLarge, largest_difference, net
from tests.thorough import THOROUGH


@cache
def xs() -> Any:
    """Return the inputs."""
    return torch.randn(26, 6, generator=torch.Generator().manual_seed(2))


@cache
def ys() -> Any:
    """Return the targets."""
    return torch.arange(26) % 4


EVERY = 1 if THOROUGH else 5


def _places(fit: Callable[[int], tuple[Any, Planted]], least: int) -> None:
    """Assert that a fit is the same with an error at each so-many-th operation of the passes of its second batch."""
    plain, at = fit(0)[0], 1
    while True:
        state, planted = fit(at)
        assert largest_difference(plain, state) <= 1e-6, at
        if not planted.has_raised:
            break
        at += EVERY
    assert at > least


def _learner(**options: Any) -> Any:
    fastai = pytest.importorskip("fastai.basics")
    pytest.importorskip("fastai.callback.progress")  # `no_bar` is its patch
    rows = [(xs()[n], ys()[n]) for n in range(26)]
    loaders = fastai.DataLoaders(fastai.DataLoader(rows[:18], bs=8), fastai.DataLoader(rows[18:], bs=8))
    options = {"loss_func": fastai.CrossEntropyLossFlat(), "metrics": fastai.accuracy, **options}
    return fastai.Learner(loaders, options.pop("model", None) or net(), **options)


def _callbacks(kind: str) -> list[Any]:
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientAccumulation, GradientClip

    class Half(Callback):  # type: ignore[misc]
        order = 10

        def before_batch(self) -> None:
            self.autocast = torch.autocast("cpu", torch.bfloat16)
            self.autocast.__enter__()

        def after_pred(self) -> None:
            self.learn.pred = self.pred.float()

        def after_loss(self) -> None:
            self.autocast.__exit__(None, None, None)

    return {"plain": [], "accumulation": [GradientAccumulation(16)], "clip": [GradientClip(0.1)], "half": [Half()]}[kind]


@pytest.mark.parametrize("kind", ["plain", "accumulation", "clip", "half"])
def test_a_learners_fit(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    learner = _learner()
    from fastai.callback.core import Callback

    def fit(at: int) -> tuple[Any, Planted]:
        planted = Planted(at)

        class Arm(Callback):  # type: ignore[misc]
            order = 10**5

            def before_batch(self) -> None:
                planted.is_armed = self.training and self.train_iter == 1

            def after_backward(self) -> None:
                planted.is_armed = False

        survives = nbguard.SurviveOOM()
        learner = _learner(cbs=_callbacks(kind))
        torch.manual_seed(1)
        with learner.no_bar(), learner.no_logging(), planted:
            learner.fit(2, 1e-2, cbs=[Arm(), survives])
        assert bool(survives.changes) is planted.has_raised
        assert not any(change.refusal for change in survives.changes)
        assert {"_do_one_batch"} & vars(learner).keys() == {"forward"} & vars(learner.model).keys() == set()
        assert torch.autograd.backward.__module__ == "torch.autograd"
        state = [list(learner.opt.state[parameter].values()) for parameter in learner.model.parameters()]
        figures = [list(map(float, learner.recorder.losses)), [list(map(float, row)) for row in learner.recorder.values]]
        if kind == "half":  # rounded to bfloat16 for each piece: the state that is restored is all that can be compared
            return [torch.get_rng_state(), float(torch.is_autocast_enabled("cpu"))], planted
        return [learner.model.state_dict(), state, figures, torch.get_rng_state()], planted

    _places(fit, 12)
    assert "epoch 1, batch 2" in capsys.readouterr().out
    del learner


def test_validation_predictions_lr_find_and_fine_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = _learner(path=tmp_path)
    from fastai.callback import schedule  # noqa: F401 - `lr_find` is its patch

    survives = nbguard.SurviveOOM()
    learner = _learner(path=tmp_path)
    with plain.no_bar(), plain.no_logging(), learner.no_bar(), learner.no_logging():
        assert largest_difference(list(_evaluated(plain)), list(_evaluated(learner, survives))) <= 1e-6
        assert [(change.trains, change.size) for change in survives.changes] == [(False, 4)]
        with TooLarge(4):
            learner.add_cb(survives)
            learner.lr_find(num_it=3, show_plot=False)
            learner.fine_tune(1)
        assert [(change.trains, change.size) for change in survives.changes] == [(False, 4), (True, 4)], "kept from fit to fit"
        assert len(pickle.loads(pickle.dumps(survives)).changes) == 2
        learner.remove_cb(survives)
        with pytest.raises(torch.OutOfMemoryError, match="Tried"), TooLarge(4):
            learner.validate()


def _evaluated(learner: Any, *callbacks: Any) -> Iterator[Any]:
    """Yield the loss, metrics and predictions of a validation."""
    with TooLarge(10**6 if not callbacks else 4):
        yield [float(value) for value in learner.validate(cbs=list(callbacks))]
        yield list(learner.get_preds(cbs=list(callbacks)))


def test_a_fit_that_fails_leaves_nothing_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    learner = _learner(model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    survives = nbguard.SurviveOOM()
    with learner.no_bar(), learner.no_logging(), pytest.raises(torch.OutOfMemoryError) as raised, TooLarge(4):
        learner.fit(1, cbs=survives)
    assert raised.value.args == (MESSAGE,)
    assert "piecewise_batch_norm=True" in capsys.readouterr().out
    assert {"_do_one_batch"} & vars(learner).keys() == {"forward"} & vars(learner.model).keys() == set()
    with learner.no_bar(), learner.no_logging(), TooLarge(4):
        learner.fit(1, cbs=nbguard.SurviveOOM(piecewise_batch_norm=True))


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    rows = [{"input_ids": torch.arange(n, n + 3) % 9, "labels": torch.arange(n, n + 3) % 9} for n in range(8)]

    def fit(at: int) -> tuple[Any, Planted]:
        planted = Planted(at)

        class Armed(transformers.Trainer):  # type: ignore[misc,name-defined]
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                planted.is_armed = self.state.global_step == 1
                try:
                    return super().training_step(*args, **kwargs)
                finally:
                    planted.is_armed = False

        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, num_key_value_heads=1, use_cache=False))
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            max_grad_norm=0,
        )
        trainer = Armed(model, arguments, train_dataset=rows)
        with nbguard.survive(trainer) as guard, planted:
            trainer.train()
        assert [change.pieces for change in guard.changes] == [2] * planted.has_raised
        return [model.state_dict(), trainer.state.log_history[-1]["train_loss"]], planted

    global EVERY
    every, EVERY = EVERY, 1 if THOROUGH else 40
    try:
        _places(fit, 40)
    finally:
        EVERY = every


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(at: int) -> tuple[Any, Planted]:
        planted = Planted(at)

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.body = net()
                self.losses: list[Any] = []

            def training_step(self, batch: Any, number: int) -> Any:
                planted.is_armed = number == 1
                loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
                self.losses.append(loss.detach())
                return loss

            def on_after_backward(self) -> None:
                planted.is_armed = False

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        module = Module()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs(), ys()), batch_size=8)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, **quiet)
        with nbguard.survive(module) as guard, planted:
            trainer.fit(module, loader)
        assert [change.pieces for change in guard.changes] == [2] * planted.has_raised
        return module.state_dict(), planted

    _places(fit, 12)


def test_a_profile_lets_a_fit_survive() -> None:
    learner = _learner()
    with learner.no_bar(), learner.no_logging(), TooLarge(4), nbguard.profile_fit(show=False, survive=True) as profile:
        learner.fit(1)
    assert profile.report.ending == "complete"
    assert any("2 pieces of 4 items" in note for note in profile.report.notes)
    assert not any(type(callback).__name__ == "SurviveOOM" for callback in learner.cbs)
    assert "_do_one_batch" not in vars(learner)
