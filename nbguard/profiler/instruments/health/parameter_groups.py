"""The parameter groups of an optimizer, torch's or fastai's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of


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
