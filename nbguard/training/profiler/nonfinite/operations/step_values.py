"""The variables and weights of a step that failed, kept until its operations are known, as the next step changes them all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.roots.frames import frame_locals
from nbguard.shell import running_shell
from nbguard.training.profiler.nonfinite.operations.operation_trace import StepProgram, StepTrace

_Name = tuple[Any, ...]
"""A variable: the code of its frame, its name, and the places in containers."""
_MOST = 64
"""Items of a container that are examined."""
_DEEPEST = 3
"""Containers in containers that are examined."""
_FRAMES = 60
_CONTAINERS = (list, tuple)


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """The operations of a step up to its loss, and the variables that it had then."""

    program: StepProgram
    loss: int  # slot
    names: dict[_Name, tuple[int, Any, Any]]  # slot, shape and type of tensors that no gradient goes through
    until: int  # operations up to the loss: those that follow are between the backward pass and the step
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)  # slots after the backward pass and at the step
    hooks: list[CodeType] = field(default_factory=list)  # of its tensors

    @classmethod
    def of(cls, trace: StepTrace, loss: Any, variables: dict[_Name, Any]) -> RecordedStep | None:
        """Return the operations recorded up to a loss, or None where none of them made it."""
        slot = trace.slot_of(loss)
        if slot is None or not trace.is_whole:
            return None
        step = cls(program=trace.program, loss=slot, names={}, until=len(trace.program.calls), hooks=trace.hooks)
        step.note(trace, variables)
        return step

    def note(self, trace: StepTrace, variables: dict[_Name, Any]) -> None:
        """Note the variables whose tensors the step has read, or made, so far."""
        for name, tensor in variables.items():
            number = None if tensor.requires_grad else trace.slot_of(tensor)
            if number is not None:
                self.names.setdefault(name, (number, tensor.shape, tensor.dtype))


class StepValues:
    """The tensors that variables have now, and copies of the weights."""

    def __init__(self, arguments: Iterable[Any], weights: Iterable[Any]) -> None:
        """`arguments`: of the models' calls. `weights`: that the optimizer is about to change."""
        self.variables: dict[_Name, Any] = named_tensors(arguments)
        self._weights: dict[int, Any] = {}
        for weight in (*weights, *(tensor for tensor in self.variables.values() if tensor.is_leaf and tensor.requires_grad)):
            if id(weight) not in self._weights:
                self._weights[id(weight)] = weight.detach().clone()

    @classmethod
    def none(cls) -> StepValues:
        """Return no values: those of the step that is recorded are as good."""
        values = cls.__new__(cls)
        values.variables, values._weights = {}, {}
        return values

    def by_slot(self, step: RecordedStep) -> dict[int, Any] | None:
        """Return these values by the slots of a step that was recorded; None where its shapes are others."""
        values: dict[int, Any] = {}
        for number in step.program.outside:
            weight = self._weights.get(id(step.program.tensor(number)))
            if weight is not None:
                values[number] = weight
        held = {slot: step.program.tensor(slot) for slot in step.program.outside}

        def is_the_same(item: tuple[_Name, tuple[int, Any, Any]]) -> bool:
            """Say whether a variable still has its tensor, as an item of a list of batches has."""
            name, (slot, *_) = item
            return slot in held and held[slot] is self.variables.get(name)

        for name, (slot, shape, dtype) in sorted(step.names.items(), key=is_the_same):
            value = self.variables.get(name)
            if value is None or value.requires_grad or slot in values:  # a graph has made it since
                continue
            if value.shape != shape or value.dtype != dtype:
                return None
            values[slot] = value
        return values

    def name_of(self, step: RecordedStep, slot: int) -> tuple[str, bool]:
        """Return the variable of a slot, and whether a model was called with it; "" where it has none."""
        names = [name for name, (number, *_) in step.names.items() if number == slot]
        written = next((f"{name[2]}{_path(name[3:])}" for name in names if name[0] != "call"), "")
        return written, any(name[0] == "call" for name in names)


def _path(places: tuple[Any, ...]) -> str:
    return "".join(f".{place}" if type(place) is str else f"[{place}]" for place in places)


def named_tensors(arguments: Iterable[Any]) -> dict[_Name, Any]:
    """Return the tensors of the variables of the frames that run, and those in the arguments of calls."""
    found: dict[_Name, Any] = {}
    with torch._C.DisableTorchFunction():
        for number, argument in enumerate(arguments):
            found.update(_tensors(("call", number), argument, _DEEPEST))
        for frame in user_frames():
            for name, value in frame_locals(frame).items():
                found.update(_tensors((frame.f_code.co_filename, frame.f_code.co_name, name), value, _DEEPEST))
                if name == "self" and (attributes := attributes_of(value)) is not None:
                    for attribute, inside in list(attributes.items()):
                        found.update(_tensors((frame.f_code.co_filename, frame.f_code.co_name, name, attribute), inside, 1))
    return found


def user_frames() -> Iterator[FrameType]:
    """Yield the frames that have led here, without nbguard's own and the shell's."""
    own = library_paths()[-1]
    frame: FrameType | None = sys._getframe(1)
    shell = running_shell()
    for _ in range(_FRAMES):
        if frame is None or (shell is not None and frame.f_code.co_name == "run_code"):
            return
        if not frame.f_code.co_filename.startswith(own):
            yield frame
        frame = frame.f_back


def _tensors(name: _Name, value: Any, depth: int) -> Iterator[tuple[_Name, Any]]:
    cls = type(value)
    if torch.Tensor in mro_of(cls):
        yield name, value
    elif depth and cls in _CONTAINERS:
        for place, item in enumerate(value[:_MOST]):
            yield from _tensors((*name, place), item, depth - 1)
    elif depth and dict in mro_of(cls) and dict.__len__(value) <= _MOST:
        for key, item in dict.items(value):
            if type(key) is str:
                yield from _tensors((*name, key), item, depth - 1)
