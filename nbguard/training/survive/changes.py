"""A change that lets a fit go on after it ran out of memory, or the reason why there is none, as frozen data and in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from nbguard.training.survive.state import clock, wait
from nbguard.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalChange:
    """A change that was made after an out-of-memory error. All sizes are bytes."""

    where: str  # `epoch 3, batch 412`
    trains: bool = True  # False: the batch is one of a validation, and nothing is computed again
    batch: int = 0  # items of the batch that did not fit
    size: int = 0  # items of a piece from now on; 0: the call runs whole again
    pieces: int = 1  # that the call of this batch runs in
    moved: int = 0  # bytes of tensors that were moved to host memory and back to make room
    extra: float | None = None  # share of a batch's time that computing again takes; None if it was not measured
    is_piecewise_norm: bool = False  # batch norms take the statistics of a piece
    draws: bool = False  # the model draws random numbers, and draws others for each piece
    refusal: str = ""  # why nothing could be done, and the error was raised; empty if something was
    is_raised: bool = True  # with a refusal: there was an error; False: pieces were asked for from the first batch on

    @property
    def sentence(self) -> str:
        """Return the change in a sentence without its first capital."""
        if self.refusal and not self.is_raised:
            return f"{self.where}: {self.refusal}; it runs whole"
        if self.refusal:
            return f"{self.where}: out of memory, and {self.refusal}"
        head = f"{self.where}: out of memory; "
        if not self.size:
            return f"{head}{format_bytes(self.moved)} moved to host memory and back made room for the batch"
        head += f"the model's call runs in {counted(self.pieces, 'piece')} of {self.size} items since then, "
        if not self.trains:
            return head + "same outputs"
        weights = "with batch norms over a piece" if self.is_piecewise_norm else "same weights"
        weights += ", random numbers drawn for each piece" if self.draws else ""
        return head + weights + ("" if self.extra is None else f", about +{self.extra:.0%} time")


RECENT: deque[str] = deque(maxlen=3)
"""The last sentences that were said in the cell that runs, or in the last one, for the panel."""


class ChangeLog:
    """Says each change and refusal once; a division only when its first batch is over, with the time that it takes.

    Args:
        where: returns the place of the batch that runs, in words.
        say: called with each sentence.
    """

    def __init__(self, where: Callable[[], str], say: Callable[[str], None]) -> None:
        self.changes: list[SurvivalChange] = []
        self.where, self._say = where, say
        self._unsaid: SurvivalChange | None = None  # a division whose first batch is not over
        self._begun = self._repeated = 0.0  # when that batch began, and the seconds of it that pieces were computed again

    def tell(self, change: SurvivalChange) -> None:
        """Say a change now."""
        self.changes.append(change)
        RECENT.append(change.sentence)
        self._say(f"nbguard: {change.sentence}")

    def refuse(self, reason: str, *, raises: bool) -> None:
        """Say why nothing is done about an error, or why pieces that were asked for are not made."""
        self._unsaid = None
        self.tell(SurvivalChange(where=self.where(), refusal=reason, is_raised=raises))

    def divide(self, change: SurvivalChange) -> None:
        """Say a division when its first batch is over."""
        self._unsaid, self._begun = change, 0.0

    def begin(self) -> None:
        """Start the clock of the first batch that is divided."""
        if self._unsaid is not None:
            wait()
            self._begun, self._repeated = clock(), 0.0

    def repeat_begins(self) -> float:
        """Return the time at which a piece is computed again; 0 if it is not measured."""
        if self._unsaid is None:
            return 0.0
        wait()
        return clock()

    def repeat_ends(self, begun: float) -> None:
        """Count the time since then."""
        if begun:
            wait()
            self._repeated += clock() - begun

    def batch_ends(self, *, is_complete: bool) -> None:
        """Say the division that is new, if there is one; with the time that it takes if its first batch is complete."""
        if self._unsaid is None:
            return
        change, self._unsaid = self._unsaid, None
        if is_complete and self._begun:
            wait()
            once = clock() - self._begun - self._repeated
            change = replace(change, extra=self._repeated / max(once, 1e-9))
        self.tell(change)
