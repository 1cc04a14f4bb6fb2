"""Mixed precision in real loops: the scale's history, skipped steps, and what is missing or needless."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from nbguard.profiler.analysis.health.amp import AmpFacts, amp_findings
from nbguard.profiler.instruments.health.amp import AmpWatch
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
    assert severities(facts) == ["note"]
    assert "4 of 20 steps skipped" in amp_findings(facts)[0].evidence


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
    assert severities(facts) == ["note"]


def test_a_scale_given_by_hand_is_static() -> None:
    facts = train(torch.float16, torch.amp.GradScaler("cpu"), given=128.0)

    assert facts.scalers[0].is_static
    assert "static" in amp_findings(facts)[0].evidence


def test_float16_without_a_scaler_is_a_problem_and_bfloat16_is_not() -> None:
    assert severities(train(torch.float16)) == ["problem"]
    assert severities(train(torch.bfloat16)) == []
    assert severities(train(None)) == []


def test_a_scaler_is_not_needed_for_bfloat16() -> None:
    assert severities(train(torch.bfloat16, torch.amp.GradScaler("cpu"))) == ["advice", "note"]
    assert severities(train(torch.bfloat16, torch.amp.GradScaler("cpu", enabled=False))) == []
