"""Mixed precision in real loops: the scale's history, skipped steps, and what is missing or needless."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from nbguard import profile_fit
from nbguard.training.profiler.checks.amp import AmpFacts, AmpWatch, amp_findings, scale_settings
from tests.profiler.loops import model, torch_loader
from tests.profiler.recording import recording


def train(
    dtype: torch.dtype | None, scaler: Any = None, bad: tuple[int, ...] = (), steps: int = 20, given: float | None = None
) -> AmpFacts:
    """Train for some steps; the gradients of the steps in `bad`, from 1, are infinite."""
    watch, model = AmpWatch(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with recording(watch):
        for step in range(1, steps + 1):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.ones(2, 8)).float().square().mean()
            loss = loss * math.inf if step in bad else loss
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update(given)
    assert "update" in vars(torch.amp.GradScaler)
    assert not hasattr(torch.amp.GradScaler.update, "__wrapped__")
    return watch.observe()


def severities(facts: AmpFacts) -> list[str]:
    return [found.severity for found in amp_findings(facts)]


def test_steps_skipped_at_the_start_are_how_the_scale_finds_its_level() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu", init_scale=4096.0), bad=(1, 2, 3, 5))

    (scaler,) = facts.scalers
    assert scaler.skipped == (1, 2, 3, 5)
    assert scaler.scales == ((1, 2048.0), (2, 1024.0), (3, 512.0), (5, 256.0))
    assert (scaler.updates, scaler.last, facts.in_dtype("float16")) == (20, 256.0, 20)
    assert severities(facts) == []
    assert "4 of 20 steps skipped" in scale_settings(facts)[0].note


def test_steps_skipped_later_are_a_problem() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu"), bad=(12, 14, 16, 18))

    (found,) = amp_findings(facts)
    assert found.severity == "problem"
    assert "4 steps skipped" in found.what


def test_a_scale_below_one_is_a_problem() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu", init_scale=2.0), bad=(1, 2))

    (found,) = amp_findings(facts)
    assert (found.severity, "0.5" in found.what) == ("problem", True)


def test_a_scale_that_grows_is_followed() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5))

    assert facts.scalers[0].scales == ((5, 16.0), (10, 32.0), (15, 64.0), (20, 128.0))
    assert severities(facts) == []


def test_a_scale_given_by_hand_is_static() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu"), given=128.0)

    assert facts.scalers[0].is_static
    assert "static" in scale_settings(facts)[0].note
    assert severities(facts) == []


def test_float16_without_a_scaler_is_a_problem_and_bfloat16_is_not() -> None:
    assert severities(train(torch.float16)) == ["problem"]
    assert severities(train(torch.bfloat16)) == []
    assert severities(train(None)) == []


def test_a_scaler_is_not_needed_for_bfloat16() -> None:
    assert severities(train(torch.bfloat16, torch.amp.GradScaler("cpu"))) == ["advice"]
    assert severities(train(torch.bfloat16, torch.amp.GradScaler("cpu", enabled=False))) == []


@pytest.mark.parametrize(
    ("scaler", "given"),
    [
        (lambda: torch.amp.GradScaler("cpu"), None),
        (lambda: torch.amp.GradScaler("cpu", init_scale=math.inf), None),
        (lambda: torch.amp.GradScaler("cpu", init_scale=2.0**-148), None),  # halved twice, it is 0
        (lambda: torch.amp.GradScaler("cpu", growth_interval=10**9), None),
        (lambda: torch.amp.GradScaler("cpu"), 2.0**127),
    ],
    ids=["dynamic", "infinite", "zero", "never grows", "given"],
)
def test_a_model_whose_every_step_was_skipped_was_not_trained(scaler: Any, given: float | None) -> None:  # seeds3.md W8
    bad = tuple(range(1, 17))
    facts = train(torch.float16, scaler(), bad=bad, steps=16, given=given)

    found = amp_findings(facts)[0]
    assert (found.kind, found.severity) == ("not trained", "problem")
    assert found.what == "the model was not trained: every one of 16 steps was skipped"
    assert "nothing" not in found.change


def test_a_scale_that_is_too_high_is_said_to_be() -> None:
    facts = train(None, torch.amp.GradScaler("cpu", init_scale=2.0**120), bad=tuple(range(1, 17)), steps=16)

    assert "GradScaler()` starts at 65536" in amp_findings(facts)[0].change


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ((1, 2, 3), []),
        ((1, 2, 3, 4), []),
        (tuple(range(1, 13)), ["12 of 20 steps were skipped because their gradients were not finite"]),
    ],
)
def test_a_fit_that_skips_more_than_half_of_its_steps_has_a_problem(bad: tuple[int, ...], what: list[str]) -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu"), bad=bad)

    assert [found.what for found in amp_findings(facts)] == what


@pytest.mark.parametrize(("given", "both"), [(None, False), (None, True), (128.0, False), (128.0, True)])
def test_of_two_optimizers_the_one_that_steps_has_trained_its_model(given: float | None, both: bool) -> None:
    watch, models = AmpWatch(), (nn.Linear(8, 4), nn.Linear(8, 4))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    scaler = torch.amp.GradScaler("cpu")
    with recording(watch):
        for _ in range(16):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = model(torch.ones(2, 8)).square().mean()
                optimizer.zero_grad()
                scaler.scale(loss * math.inf if both or model is models[1] else loss).backward()
                scaler.step(optimizer)
            scaler.update(given)

    (seen,) = watch.observe().scalers
    assert (len(seen.skipped), seen.idle, seen.optimizers) == (16, 16 if both else 0, 2)
    kinds = [found.kind for found in amp_findings(watch.observe(), optimizers=2)]
    assert kinds == (["not trained"] if both else ["amp"])
    assert "the model was not trained" not in amp_findings(watch.observe(), optimizers=3)[0].what


def test_a_nan_in_the_loss_is_the_cause_of_the_steps_that_are_skipped() -> None:  # bugs3.md 15
    def fit() -> None:
        net, scaler = model(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for x, _ in torch_loader():
            loss = torch.acos(1.5 + net(x).abs()).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    with profile_fit(show=False) as profile:
        fit()
    report = profile.report
    (first,) = report.first
    assert first.startswith(
        "the model was not trained: every one of 8 steps was skipped, as the loss is NaN in batch 1 of epoch 1"
    )
    assert (report.skipped_steps, report.scaled_steps) == (8, 8)
    assert "bfloat16" not in first
    assert [found.kind for found in report.findings if found.severity == "problem"] == ["not trained"]


@pytest.mark.parametrize(
    ("scale", "is_scaled"),
    [
        (lambda loss: loss * 512, True),
        (lambda loss: 1024.0 * loss / 4, True),
        (lambda loss: loss.mul(torch.tensor(512.0)), True),
        (lambda loss: (loss * 512).sum(), True),
        (lambda loss: loss, False),
        (lambda loss: loss / 4, False),
        (lambda loss: 0.5 * loss, not hasattr(torch._C._autograd.SavedTensor, "unpack_hook")),  # a factor that is not shown
        (lambda loss: loss + 512, False),
    ],
)
def test_a_loss_that_the_loop_multiplies_is_scaled_by_hand(scale: Any, is_scaled: bool) -> None:  # seeds3.md W11
    watch, net = AmpWatch(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with recording(watch):
        for _ in range(8):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.ones(2, 8)).float().square().mean()
            optimizer.zero_grad()
            scale(loss).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad /= 512
            optimizer.step()

    facts = watch.observe()
    assert facts.by_hand == 8 * is_scaled
    assert severities(facts) == [] if is_scaled else ["problem"]
    assert [setting.value for setting in scale_settings(facts)] == ["by hand"] * is_scaled


def test_a_scale_that_never_grows_is_no_dynamic_one() -> None:  # seeds3.md W11
    facts = train(torch.float16, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**9))

    (setting,) = scale_settings(facts)
    assert setting.note.startswith("static")
    assert "dynamic" in scale_settings(train(torch.float16, torch.amp.GradScaler("cpu")))[0].note
