"""A change that lets a fit go on after it ran out of memory, or the reason why there is none, as frozen data and in words."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nbguard.training.survive.state import clock, wait
from nbguard.units import counted, format_bytes

# --- Several ranks that train together: which of them may run a batch again on its own
#
# A rank that divides its model's call makes the same collectives in the same order as before, so the others only wait a little
# longer, and no rank has to agree. That holds where nothing that is repeated has a collective in it. An exchange of a flag
# could not save the rest: the other ranks are inside a collective of the batch already, and would never come to it.


_COLLECTIVE = ("c10d", "_c10d_functional")
"""Namespaces of the operations that ranks do together."""
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Classes that gather parameters from other ranks in their calls."""


def is_alone() -> bool:
    """Say whether no other rank trains along."""
    return _group() is None


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")
    if not hasattr(distributed, "is_initialized") or not distributed.is_initialized():  # a build may be without it
        return None
    return distributed if distributed.get_world_size() > 1 else None


def collectives_so_far() -> int:
    """Return a number that each collective of this rank raises; 0 where it is alone."""
    distributed = _group()
    if distributed is None:
        return 0
    return sum(group._get_sequence_number_for_group() for group in distributed.distributed_c10d._world.pg_map)


def without_ddp(model: Any) -> Any:
    """Return the model that a DistributedDataParallel is around, whose own call has no collective; any other as it is."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return model.module if parallel is not None and isinstance(model, parallel.DistributedDataParallel) else model


def sharding(model: Any) -> str:
    """Return why the call of a model needs the other ranks, as far as its layers tell; empty if they don't say so."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    for module in model.modules():
        name = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _SHARDED), "")
        if name or without_ddp(module) is not module:
            return f"`{name or type(module).__name__}` exchanges tensors with the other ranks in each call"
    if tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters()):
        return "its parameters are spread over the ranks"
    return ""


def no_collectives(refused: type[Exception]) -> Any:
    """Return a context that raises before any collective: the other ranks would wait for ever."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoCollectives(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in _COLLECTIVE:
                raise refused(f"it exchanges tensors with the other ranks (`{func.overloadpacket.__name__}`)")
            return func(*args, **(kwargs or {}))

    return NoCollectives()


# --- changes


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
