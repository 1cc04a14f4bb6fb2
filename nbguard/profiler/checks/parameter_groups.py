"""The parameter groups of an optimizer, torch's or fastai's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of, name_of


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share settings. It is made for one look, and not kept."""

    parameters: tuple[Any, ...]
    settings: Mapping[str, Any]


def torchs(optimizer: Any) -> Any | None:
    """Return the optimizer of torch, also out of fastai's wrapper; None of fastai's own."""
    torch: Any = sys.modules["torch"]
    if torch.optim.Optimizer in mro_of(type(optimizer)):
        return optimizer
    inner = attribute_of(optimizer, "opt")
    return inner if torch.optim.Optimizer in mro_of(type(inner)) else None


def groups_of(optimizer: Any) -> list[Group]:
    """Return the groups of an optimizer; an empty list for an unknown kind of optimizer."""
    inner = torchs(optimizer)
    if inner is not None:
        return [Group(tuple(group["params"]), group) for group in inner.param_groups]
    lists, hypers = attribute_of(optimizer, "param_lists"), attribute_of(optimizer, "hypers")
    if lists is None or hypers is None:
        return []
    return [Group(tuple(parameters), settings) for parameters, settings in zip(lists, hypers, strict=False)]


def fusible(optimizer: Any, groups: list[Group]) -> str:
    """Return torch's class that does the same as an optimizer with `fused=True`; empty if it is fused, or none is known."""
    inner = torchs(optimizer)
    if inner is None:
        return _LIKE_FASTAI.get(_steppers(optimizer), "")
    is_fused = any(group.settings.get("fused") is True for group in groups)
    is_floating = all(parameter.is_floating_point() for group in groups for parameter in group.parameters)
    return "" if is_fused or not is_floating or "fused" not in _arguments(type(inner)) else name_of(type(inner))


def is_looped(optimizer: Any, groups: list[Group]) -> bool:
    """Say whether an optimizer of torch's was told to step its parameters one by one."""
    inner = torchs(optimizer)
    is_told = any(group.settings.get("foreach") is False for group in groups)
    return inner is not None and is_told and "foreach" in _arguments(type(inner))


_LIKE_FASTAI = {
    frozenset(("weight_decay", "adam_step")): "AdamW",
    frozenset(("l2_reg", "adam_step")): "Adam",
    frozenset(("weight_decay", "sgd_step")): "SGD",  # without momentum both decays are alike
    frozenset(("l2_reg", "sgd_step")): "SGD",
    frozenset(("l2_reg", "momentum_step")): "SGD",
}
"""torch's optimizers that step as fastai's own do, by the functions that these call."""


def _steppers(optimizer: Any) -> frozenset[str]:
    """Return the names of the functions of fastai's that make a step, averages apart."""
    functions = attribute_of(attribute_of(optimizer, "cbs"), "items")
    names = (function.__name__ for function in functions if type(function) is FunctionType) if type(functions) is list else ()
    return frozenset(name for name in names if not name.startswith(("average", "step_stat")))


def _arguments(cls: type) -> tuple[str, ...]:
    """Return the names of the arguments that a class is made with."""
    make = next((vars(base)["__init__"] for base in mro_of(cls) if "__init__" in vars(base)), None)
    if type(make) is not FunctionType:
        return ()
    return make.__code__.co_varnames[: make.__code__.co_argcount + make.__code__.co_kwonlyargcount]
