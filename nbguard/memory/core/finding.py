"""One thing that stands out, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.memory.core.advice import NONE, Advice


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the user, and the commands that act on it. Code stands between backticks."""

    kind: str
    sentence: str
    advice: Advice = NONE
    learner: str = ""  # the Learner that it is about as long as no fit runs on it; empty if it holds whatever runs

    @property
    def command(self) -> str:
        """Return the line that acts on it, which stands in the sentence; empty where there is none."""
        return self.advice.command
