"""One thing that stands out, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the user, and the command in it that acts on it. Code stands between backticks."""

    kind: str
    sentence: str
    command: str
    learner: str = ""  # the Learner that it is about as long as no fit runs on it; empty: it holds whatever runs
