"""One thing that stands out, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbguard.memory.advice import NONE, Advice


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the user, and what acts on it. Code stands between backticks."""

    kind: str
    sentence: str
    advice: Advice = NONE
    learner: str = ""  # the Learner that it is about as long as no fit runs on it; empty: it holds whatever runs
    command: str = field(init=False)  # the line of the advice, which stands in the sentence; empty where there is none

    def __post_init__(self) -> None:
        """Set `command` by the advice, for those who read only that."""
        object.__setattr__(self, "command", self.advice.command)
