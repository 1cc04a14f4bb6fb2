"""One change that lets a fit go on after it ran out of memory, or the reason why none does, as frozen data and in words."""

from __future__ import annotations

from dataclasses import dataclass

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
