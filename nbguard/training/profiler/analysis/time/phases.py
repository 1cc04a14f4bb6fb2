"""The phases of a fit, in the words of the report."""

from __future__ import annotations

WAIT = "wait for data"
TO_DEVICE = "to device"
TRANSFORMS = "batch transforms"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
STEP = "optimizer step"
ZERO_GRAD = "zero_grad"
WORKERS = "workers start"
OWN = "nbguard itself"
OTHER = "other code"

STEP_PHASES = (WAIT, TO_DEVICE, TRANSFORMS, FORWARD, LOSS, BACKWARD, STEP, ZERO_GRAD)
"""The phases of a training batch, in the order of their run. Callbacks are added to them by name."""

ALL = (*STEP_PHASES, WORKERS, OWN, OTHER)


def callback(name: str) -> str:
    """Return the phase of a callback, by the name of its class. Only for display: logs keep the name separately."""
    return f"callback {name}"
