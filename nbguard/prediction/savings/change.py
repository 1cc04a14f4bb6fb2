"""A change to a fit that may save memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that can be tried."""

    name: str
    cost: str  # what it costs, in words
    code: str = ""  # lines that change the Learner, by the name `learn`, or a step's models and optimizers, by theirs
    parts: int = 1  # into how many batches one is cut
    conf: str = ""  # setting of the allocator


def added_up(parts: int, size: int, code: str, more: str) -> Change:
    """Return the change to smaller batches whose gradients are added up.

    Args:
        parts: into how many batches one is cut.
        size: items of a batch as it is.
        code: lines that let the optimizer wait.
        more: what else there is to know, in words that begin with a separator.
    """
    return Change(
        name=f"gradients of {parts} batches of {size // parts} added up", code=code, parts=parts, cost=f"a little slower{more}"
    )
