"""A check is one file: a class in `CHECKS` watches, is saved, diagnosed and shown; nothing else knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import nbguard
from nbguard.training.profiler import checks
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.analysis.observations import FitObservations
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.recorder import Recorder
from tests.profiler.loops import train


@dataclass(frozen=True, slots=True)
class _Names:
    models: tuple[str, ...] = ()


class _NameWatch:
    watches = "names of models"
    name = "names"
    facts = _Names

    def start(self, recorder: Recorder) -> None:
        self._seen: dict[str, None] = {}
        recorder.subscribe("forward", self._forward)

    def _forward(self, module: Any, _args: Any) -> None:
        self._seen[type(module).__name__] = None

    def stop(self) -> None:
        pass

    def observe(self) -> _Names:
        return _Names(tuple(self._seen))

    @staticmethod
    def diagnose(facts: _Names, fit: FitFigures) -> Iterable[FitFinding]:
        for name in facts.models:
            evidence = f"{len(fit.times)} phases were timed"
            yield FitFinding(kind="switch", severity="note", what=f"`{name}` was called", evidence=evidence, change="")


def test_a_toy_check_watches_is_saved_and_has_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS, _NameWatch))
    with nbguard.profile_fit(show=False) as profile:
        train(1)

    observed = FitObservations.from_json(profile.observations.to_json())
    (name,) = observed.of(_Names).models
    assert f"`{name}` was called" in [finding.what for finding in build_fit_report(observed).findings]
