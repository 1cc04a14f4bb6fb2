"""A change to a fit that may save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from nbguard.training.prediction.prediction import ChangeKind

_PARTS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that can be tried."""

    name: str
    cost: str  # its cost, in words
    code: str = ""  # lines that change the Learner, by the name `learn`, or a step's models and optimizers, by theirs
    parts: int = 1  # into how many batches one is cut
    conf: str = ""  # setting of the allocator
    kind: ChangeKind = ""  # of a change that others ask for


def added_up(
    size: int, models: Iterable[nn.Module], code: Callable[[int], str], more: Callable[[int], str]
) -> Iterator[Change]:
    """Yield the changes to batches of a half and a quarter of the items whose gradients are added up.

    Args:
        size: items of a batch as it is.
        models: the user's, which are read.
        code: lines that let the optimizer wait, by the number of parts of a batch.
        more: further lines, likewise.
    """
    has_norm = any("BatchNorm" in type(each).__name__ for model in models for each in model.modules())
    norm = "; batch norm sees fewer items" if has_norm else ""
    for parts in _PARTS:
        if size % parts == 0:
            yield Change(
                name=f"gradients of {parts} batches of {size // parts} added up",
                code=code(parts),
                parts=parts,
                kind="accumulation",
                cost=f"a little slower{norm}; {more(parts)}",
            )
