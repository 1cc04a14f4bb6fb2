"""A call that would write into the user's parameters is stopped before it does, and the model is then tried on a copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.export.model_copy import shared_copy
from nbguard.training.doctor.subject import TrialSubject


class _WritesError(Exception):
    """An operation was about to write into memory that is not its model's own."""


class WriteWatch(TorchDispatchMode):  # type: ignore[misc]
    """Refuses each operation that writes into one of some tensors; `wrote` says whether there was one."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.wrote = False
        self._storages = {pointer for tensor in tensors if (pointer := _pointer(tensor))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(each, torch.Tensor) and _pointer(each) in self._storages for each in written):
                self.wrote = True
                raise _WritesError
        return func(*args, **kwargs)


def _pointer(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 of one that has none, such as a sparse one."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def own_if_written(subject: TrialSubject, batch: TrialBatch) -> TrialSubject:
    """Return the subject; of a model that writes into its parameters when it is called, with a copy of the model instead.

    It is called once, without gradients, on parameters that share the user's memory, and stopped before the first write.
    """
    model, _ = shared_copy(subject.model)
    watch = WriteWatch(model.parameters())
    with contextlib.suppress(Exception), torch.no_grad(), watch:  # the user's own error comes again where it is told
        model(*batch.inputs, **(batch.named_inputs or {}))
    return replace(subject, model=_own(subject.model)) if watch.wrote else subject


def _own(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters lie in memory of their own."""
    copied, _ = shared_copy(model)
    return copy.deepcopy(copied)
