"""Copies of a model for exporters to do with as they like, whose parameters share the original's memory, and their repairs."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.libraries import ExportRepair
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.memory.scan.parked import hooks_of


def shared_copy(model: nn.Module) -> tuple[nn.Module, int]:
    """Return (a copy in eval mode, number of hooks that were left out).

    Parameters are views of the user's, so that no memory is taken; buffers and other tensors are copied, as a call may write
    into them. Hooks that are functions, which are not copied, would act on the user's own lists: they are left out. Hooks
    that are methods come with the copy of their object.

    Raises:
        UndiagnosableError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    left_out = [(hooks, dict(hooks)) for hooks in _function_hooks(model)]
    try:
        with _Cloning(memo):
            for hooks, _ in left_out:
                memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_function(hook))
            copied = copy.deepcopy(model, memo)
    except UndiagnosableError:
        raise
    except Exception as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"the model cannot be copied to be tried: {reason}") from error
    return copied.eval(), sum(_is_function(hook) for _, hooks in left_out for hook in hooks.values())


class _Cloning(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Copies tensors that are no leaves, too, which `copy.deepcopy` refuses: tensors that a call left in attributes."""

    def __init__(self, memo: dict[int, Any]) -> None:
        super().__init__()
        self._memo = memo

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and id(args[0]) not in self._memo:
            self._memo[id(args[0])] = args[0].detach().clone()
            return self._memo[id(args[0])]
        return func(*args, **(kwargs or {}))


def _function_hooks(model: nn.Module) -> list[Any]:
    """Return the dicts of hooks with a function."""
    dicts = [hooks for module in model.modules() for hooks in hooks_of(module)]
    return [hooks for hooks in dicts if any(map(_is_function, hooks.values()))]


def _is_function(hook: Any) -> bool:
    return types.FunctionType in mro_of(type(hook))


def apply_repair(model: nn.Module, path: str, repair: ExportRepair) -> None:
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
