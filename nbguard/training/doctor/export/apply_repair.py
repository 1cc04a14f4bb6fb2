"""A cure of a failed export, applied to a copy of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.training.doctor.analysis.repairs import ModuleRepair


def apply_repair(model: nn.Module, path: str, repair: ModuleRepair) -> None:
    """Replace a part of a model by another module, or change the setting of all of its parts."""
    if repair.replacement:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = getattr(nn, repair.replacement)()
    elif repair.setting is not None:
        name, value = repair.setting
        for module in model.modules():
            config: Any = attribute_of(module, "config")
            if attribute_of(config, name) is not None:
                setattr(config, name, value)
