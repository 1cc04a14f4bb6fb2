"""The interface of a traceable fit of any library: a copy without data that runs a few batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from nbguard.training.prediction.fits.batches import Progress


class MakeBatch(Progress, Protocol):
    """Makes the batches of a trace, and says how far it has come."""

    def __call__(self, shapes: Any, *, on_host: bool = False) -> Any:
        """Return a batch without data, noted as the fit's input.

        Args:
            shapes: `TensorShape` where the batch has a tensor.
            on_host: its tensors stand for the host's until they are moved, or used.
        """


ENDLESS = 2**24
"""Items of a training set that does not say how many it has."""


class Fit(Protocol):
    """A copy of a fit that can run without data."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the items of the training batches that have been traced, or of the first one if none has."""

    @property
    def items(self) -> int:
        """Return the items of the training set; more than any GPU has room for where that is not known."""

    @property
    def batches(self) -> int | None:
        """Return the training batches of an epoch, or None if unknown."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the untraced parts that may keep memory, in words."""

    @property
    def has_optimizer(self) -> bool:
        """Return whether an optimizer takes steps, as far as is known: gradients that only add up are not all there is."""

    @property
    def device(self) -> str:
        """Return the kind of device that the fit's own code names as its: "cpu" for a loop on a machine without a GPU."""

    @property
    def models(self) -> Iterable[Any]:
        """Return the copied modules, whose names tell places."""

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors without data that are on the device before the fit, in the order of their arrival."""

    def change(self, code: str) -> None:
        """Run lines that change the copy, before it runs: our own, the same that are shown."""

    def run(self, make: MakeBatch) -> None:
        """Run some training batches, and the validation where there is one."""


class FitSource(Protocol):
    """The user's objects that a fit consists of. They are read, and stay as they are."""

    @property
    def size(self) -> int:
        """Return the items of a batch, unless another size is asked for."""

    @property
    def modules(self) -> Iterable[tuple[str, Any]]:
        """Return (name, module) of the user's models, to be looked through for unpredictable parts."""

    @property
    def tensors(self) -> Iterable[Any]:
        """Return the user's tensors that the fit uses again: parameters, buffers, gradients, the optimizer's state."""

    def fit(self, batch_size: int | None, *, full_only: bool = False) -> Fit:
        """Return a copy of the next fit without data.

        Args:
            batch_size: items of a batch; if None, as in the loader or in the user's batch.
            full_only: the last training batch is left out if it is smaller.

        Raises:
            UnpredictableError: something cannot be copied; the message names it.
        """
