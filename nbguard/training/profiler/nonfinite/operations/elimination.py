"""The operation of a hook or of code before the step that alone can have made a gradient not finite which else would be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.training.profiler.analysis.health.operations import FailedOperation
from nbguard.training.profiler.nonfinite.operations.operation_trace import OperationLine, code_of, function_name
from nbguard.training.profiler.nonfinite.operations.source_lines import operations_at, operations_in
from nbguard.training.profiler.nonfinite.operations.step_values import RecordedStep

_Site = tuple[str, str]
"""The name of an operation, and its line in words."""


def hooks_of(parameter: Any) -> Iterator[CodeType]:
    """Yield the code of the hooks of a parameter that see its gradient."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        for hook in [*(getattr(parameter, kind, None) or {}).values()]:
            code = code_of(hook)
            if code is not None:
                yield code


def operation_of_hooks(parameters: Iterable[Any]) -> FailedOperation | None:
    """Return the only such operation in hooks of parameters; None where one of them has none."""
    hooks = [[*hooks_of(parameter)] for parameter in parameters]
    return only_operation({code for codes in hooks for code in codes}) if hooks and all(hooks) else None


def only_operation(codes: Iterable[CodeType]) -> FailedOperation | None:
    """Return the only operation in functions of the user's that can make a value which is not finite of usual ones."""
    sites = Sites()
    return _only(
        (name, OperationLine(code.co_filename, number, function_name(code)).words)
        for code in codes
        if sites.is_users(code.co_filename)
        for name, number in operations_in(code)
    )


def only_change(step: RecordedStep) -> FailedOperation | None:
    """Return the only such operation in the user's code between the backward pass and the step that has led to a gradient."""
    makers = {slot: call for call in step.program.calls[step.until :] for slot in call.makes}
    waiting = [last for before, last in step.gradients.values() if last != before]
    seen: set[int] = set()
    found: list[_Site] = []
    while waiting:
        slot = waiting.pop()
        call = makers.get(slot)
        if slot in seen or call is None:
            continue
        seen.add(slot)
        waiting.extend(call.reads)
        if call.name in operations_at(call.line.file, call.line.number):  # it is not a library's
            found.append((call.name, call.line.words))
    return _only(found)


def _only(sites: Iterable[_Site]) -> FailedOperation | None:
    every = dict.fromkeys(sites)
    able = [site for site in every if FailedOperation(name=site[0]).is_singular] or list(every)
    return FailedOperation(name=able[0][0], line=able[0][1]) if len(able) == 1 else None
