"""The last value that was not finite, as a profile met it, and the repair of the model that made it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from nbguard.errors import NbguardError, in_one_line
from nbguard.memory.core.advice import STOP_ON_NAN, repair_nan
from nbguard.memory.scan.parked import hooks_of
from nbguard.training.profiler.analysis.nonfinite import NanRepair, NotFinite, Origin, line_for
from nbguard.training.profiler.nonfinite.rerun import ForwardCall
from nbguard.training.profiler.record.model_calls import CallArguments

_last: tuple[NotFinite, weakref.ref[Any] | None] | None = None


def keep(first: NotFinite, model: Any) -> None:
    """Keep the first value of a fit that was not finite. The model is held weakly, or None if unknown."""
    global _last
    _last = first, None if model is None else weakref.ref(model)


def last_model() -> Any:
    """Return the model that made the last one; None where it is gone or was not known."""
    return None if _last is None or _last[1] is None else _last[1]()


def nan_repair(model: Any, subject: str) -> NanRepair:
    """Return the repair of the last value that was not finite.

    Args:
        model: the one that is to be repaired, or None for the one that made the value.
        subject: it or its Learner, as the notebook writes it; empty where it has no name.

    Raises:
        NbguardError: no profile met such a value, or it was another model's.
    """
    if _last is None:
        raise NbguardError(
            "no profile has seen a NaN yet: profile the fit with  "
            + STOP_ON_NAN.command
            + "  and try again, or give a batch, as in  "
            + repair_nan("learn", "--batch xb").command
        )
    first, made_by = _last
    if model is not None and made_by is not None and made_by() is not None and made_by() is not model:
        raise NbguardError("the last NaN was made by another model: profile a fit of this one with  " + STOP_ON_NAN.command)
    if first.origin.kind == "unknown":
        raise NbguardError(
            f"the layer is not known ({first.origin.note}): profile the fit with  " + STOP_ON_NAN.command + "  and try again"
        )
    return repair_of(first.origin, f"The {first.of} was {first.value} in {first.place.words}", subject)


def repair_of(origin: Origin, met: str, subject: str) -> NanRepair:
    """Return the repair that follows from the origin of a value."""
    trial = origin.trial
    layers = trial.layers if trial is not None and trial.is_finite else ()
    return NanRepair(subject=subject, met=met, origin=origin, layers=layers, line=line_for(subject, layers))


def origin_on(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Origin:
    """Return the layer of a model that makes a value which is not finite of these inputs, tried in float32.

    The autocast that is on goes for it. The model, its buffers and all generators are as before.

    Raises:
        NbguardError: the model cannot be run on them, or returns finite values.
    """
    import torch

    from nbguard.training.profiler.nonfinite.origin import origin_of_loss
    from nbguard.training.profiler.nonfinite.rerun import ModuleCounters, autocast_of, device_type

    arguments = CallArguments.of(inputs, named)
    autocast = autocast_of(torch, device_type(torch, arguments))
    call = ForwardCall(weakref.ref(model), tuple(arguments), autocast, arguments.names)
    origin = origin_of_loss(torch, [call], ModuleCounters())
    if origin.kind == "unknown":
        raise NbguardError(f"the model cannot be tried: {origin.note}")
    if origin.kind == "loss":
        raise NbguardError("the model returns finite values for this batch: give the one that failed")
    return origin


def finite_copy(model: Any, layers: tuple[str, ...]) -> Any:
    """Return a copy of a model whose named layers compute in float32. Parameters and buffers are the model's own.

    Raises:
        NbguardError: something in the model cannot be copied.
    """
    from nbguard.training.profiler.nonfinite.float32_layers import in_float32

    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for hooks in [hooks for module in model.modules() for hooks in hooks_of(module)]:
        memo[id(hooks)] = type(hooks)()  # a hook may lead to a Learner, and all that this holds
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        reason = in_one_line(error)
        raise NbguardError(
            f"the model cannot be copied ({reason}): run the command without -o for the line to paste"
        ) from error
    in_float32(copied, *layers)
    return copied
