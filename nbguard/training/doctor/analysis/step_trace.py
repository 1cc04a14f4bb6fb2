"""The bits of one step, as hashes in the order of their making, and the first place where two steps differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "loss", "backward", "gradient", "update", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One tensor of a step."""

    direction: Direction
    path: str  # of the module, as in `named_modules`; of a gradient, an update and a buffer, the tensor's full name
    side: Literal["in", "out", ""]  # of the module's tensors
    tensor: int  # number of the tensor within the step: an output of one module is the input of the next
    bits: bytes  # hash of its bytes, shape and type


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first place where two steps from one state differ."""

    path: str  # of the module; empty for the model itself, outside of its parts
    direction: Direction
    others: tuple[str, ...] = ()  # modules that get the same tensor and can each be the reason


def first_difference(one: Sequence[StepEvent], other: Sequence[StepEvent]) -> StepDifference | None:
    """Return the module and the pass where two steps first differ, or None if all their bits are the same."""
    for place, (event, twin) in enumerate(zip(one, other, strict=False)):
        if _key(event) != _key(twin):
            return StepDifference(path=event.path, direction=event.direction)
        if event.bits != twin.bits:
            if event.direction == "forward":
                return StepDifference(path=event.path if event.side == "out" else parent(event.path), direction="forward")
            if event.direction == "backward":
                return _backward(one, other, place)
            return StepDifference(path=_owner(event), direction=event.direction)
    if len(one) != len(other):
        last = min(len(one), len(other)) - 1
        return StepDifference(path=one[last].path, direction=one[last].direction)
    return None


def _backward(one: Sequence[StepEvent], other: Sequence[StepEvent], place: int) -> StepDifference:
    """Return the difference of a backward pass whose first differing gradient is that of one tensor.

    The gradient of a tensor is made by the modules that had the tensor as an input. Where none had, the code between the
    modules made it. Of a module and its parts that had the same tensor the innermost is meant; of several, the one whose
    own parameters have other gradients, too.
    """
    first = one[place]
    consumers = [event.path for event in one if _is_input(event, first.tensor)]
    innermost = [path for path in consumers if not any(_is_inside(inner, path) for inner in consumers)]
    if not innermost:
        return StepDifference(path=parent(first.path), direction="backward")
    other_gradients = {
        parent(event.path)
        for event, twin in zip(one, other, strict=False)
        if event.direction == "gradient" and event.bits != twin.bits
    }
    likely = [path for path in innermost if any(owner == path or owner.startswith(f"{path}.") for owner in other_gradients)]
    chosen = likely or innermost
    return StepDifference(path=chosen[0], direction="backward", others=tuple(chosen[1:]))


def _is_inside(inner: str, outer: str) -> bool:
    """Say whether a module is a part of another."""
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _is_input(event: StepEvent, tensor: int) -> bool:
    return event.direction == "backward" and event.side == "in" and event.tensor == tensor


def _key(event: StepEvent) -> tuple[str, str, str]:
    return event.direction, event.path, event.side


def _owner(event: StepEvent) -> str:
    return parent(event.path) if event.direction in ("gradient", "update", "buffer") else event.path


def parent(path: str) -> str:
    """Return the path of the module that has this part; empty for the model itself."""
    return path.rpartition(".")[0]


def module_name(path: str) -> str:
    """Return a module as the user writes it: `model[3].norm` for the path `3.norm`."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
    return "model" + "".join(parts)
