"""PyTorch's operators of a few batches, by their own time, with their cost, module and line."""

from __future__ import annotations

from dataclasses import dataclass, replace

_ROWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """The calls of one operator for one module and line, in all batches that were recorded. Times are nanoseconds."""

    name: str  # "aten::addmm"
    module: str = ""  # that it was called for, by name and class: "body.0 (Linear)"; "" without one or if unknown
    site: str = ""  # the user's line: "In[2], line 6 in forward()"; of a backward pass that of the forward pass
    is_backward: bool = False
    calls: int = 0
    cpu: int = 0  # on the host, without the operators that it calls
    device: int = 0  # of its kernels on the GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpan:
    """One call of an operator that no other operator made, for a trace."""

    name: str
    start: int  # nanoseconds since the recording of the fit began
    duration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """The operators of some batches of a fit."""

    times: tuple[OperatorTime, ...] = ()
    batches: int = 0  # training batches that were recorded
    note: str = ""  # why there are none, or the unknown facts of them
    spans: tuple[OperatorSpan, ...] = ()  # for `--trace`


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """The operators that take most of the time of their own."""

    rows: tuple[OperatorTime, ...]  # those that take most; by the GPU's time where there is one
    batches: int  # that they were recorded in
    cpu: int  # nanoseconds on the host that all operators took
    device: int  # and on the GPU; 0 if none
    note: str = ""


def operator_table(facts: OperatorFacts | None) -> OperatorTable | None:
    """Return the table of a report; None where it was not asked for."""
    if facts is None:
        return None
    device = sum(each.device for each in facts.times)
    ordered = sorted(facts.times, key=lambda each: (-each.device, -each.cpu) if device else (-each.cpu,))
    cpu = sum(each.cpu for each in facts.times)
    return OperatorTable(rows=tuple(ordered[:_ROWS]), batches=facts.batches, cpu=cpu, device=device, note=facts.note)


def added(times: list[OperatorTime]) -> tuple[OperatorTime, ...]:
    """Return times with those of the same operator, module and line added up."""
    sums: dict[OperatorTime, OperatorTime] = {}
    for each in times:
        key = replace(each, calls=0, cpu=0, device=0)
        old = sums.get(key, key)
        sums[key] = replace(old, calls=old.calls + each.calls, cpu=old.cpu + each.cpu, device=old.device + each.device)
    return tuple(sums.values())
