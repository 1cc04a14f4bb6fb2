"""The memory of the next fit of a Learner in the sidebar's list, as the sidebar says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbguard.frontend.notebook.magics.predict import foreseen
from nbguard.units import format_bytes, format_column, unit_of

if TYPE_CHECKING:
    from nbguard.training.prediction.prediction import Prediction


def foreseen_row(namespace: dict[str, Any], name: str) -> str:
    """Return lines on the memory of the next fit of the Learner of a name, on the device that this kernel uses, as it is now.

    Args:
        namespace: the user's names.
        name: of the Learner.

    Raises:
        NbguardError: its memory cannot be predicted; the message says why.
    """
    prediction = foreseen(namespace, name, None, None, None)
    need = f"the next fit needs {_of_capacity(prediction)}"
    return "\n".join((need, prediction.why, *(f"not counted: {text}" for text in prediction.unknown)))


def _of_capacity(prediction: Prediction) -> str:
    """Return the bytes that a fit is sure to run with, of those of the GPU: `11.2 of 14.6 GiB`."""
    need, capacity = prediction.need, prediction.capacity
    if capacity is None:
        return f"{format_bytes(need)} of a GPU"
    needed, all_of_it = (format_column([nbytes], unit_of(capacity))[0] for nbytes in (need, capacity))
    return f"{needed.split()[0]} of {all_of_it}"
