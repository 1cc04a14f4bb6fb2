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
"""What a training batch is made of, in the order in which it happens. Callbacks come beside them, by name."""

ALL = (*STEP_PHASES, WORKERS, OWN, OTHER)


def callback(name: str) -> str:
    """Return the phase in which a callback runs, by the name of its class. Only for display: logs keep the name beside it."""
    return f"callback {name}"
