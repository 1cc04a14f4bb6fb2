"""A collector of the facts of a run, where each part may fail by itself with its reason on record."""

from __future__ import annotations

from collections.abc import Callable

from nbguard.training.runs.analysis.record import MissingFact, RunFact, Topic
from nbguard.training.runs.analysis.source import without_secrets

_LONGEST_TEXT = 500
"""Characters of one value."""


class FactCollector:
    """Takes facts and reasons; values are cut to a bound, and possible secrets are taken out."""

    def __init__(self) -> None:
        self.facts: list[RunFact] = []
        self.missing: list[MissingFact] = []

    def add(self, topic: Topic, name: str, value: object) -> None:
        """Keep a fact. `value` is a text or a number of ours, never an object of the user's."""
        text = without_secrets(str(value))
        self.facts.append(RunFact(topic, name, text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"))

    def miss(self, topic: Topic, name: str, reason: str) -> None:
        """Keep that something is not known, and why."""
        self.missing.append(MissingFact(topic, name, without_secrets(reason)))

    def attempt(self, topic: Topic, name: str, act: Callable[[], None]) -> None:
        """Collect a part of the facts; where that fails, the reason is on record."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a mistake here must cost neither the run nor the rest of its record
            first = (str(error).splitlines() or [""])[0][:160]
            self.miss(topic, name, f"it could not be read ({type(error).__name__}: {first})")
