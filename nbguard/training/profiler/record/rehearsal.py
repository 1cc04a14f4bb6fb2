"""The calls of one batch around functions that do nothing, whose time is nbguard's own cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """nbguard's own calls in a batch: the calls in their order, the one that is given the loss apart."""

    before: tuple[Callable[[], Any], ...]
    loss: Callable[[Any], Any]
    after: tuple[Callable[[], Any], ...]


class Rehearsed:
    """Stands in for an object of the user's where a batch is rehearsed."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @staticmethod
    def act(*_: Any) -> None:
        """Do nothing."""
