"""The device of a Learner's fit. Trials run there, and the model is afterwards where it was, bit for bit.

fastai moves the model and the loss to the device of the DataLoaders when a fit begins, and not before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.doctor.subject import TrialSubject, fit_device


@contextlib.contextmanager
def on_fit_device(subject: TrialSubject, *models: nn.Module) -> Iterator[None]:
    """Put the subject's model and loss, and further models, on the device where its fit would run, and back afterwards.

    Only the memory behind each parameter and buffer is another one meanwhile: the objects stay the same, and so do those that
    hooks, optimizers and names lead to. Gradients stay where they are, as a trial runs on copies. The memory there is freed at
    once, though `torch.export` leaves reference cycles behind that lead to it.

    Raises:
        UndiagnosableError: they cannot be moved; the message says why.
    """
    device = fit_device(subject)
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        if device is not None:
            _move((subject.model, subject.loss, *models), device, moved)
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            while moved:
                tensor, before = moved.pop()
                there, tensor.data = tensor.data, before
                there.untyped_storage().resize_(0)


def _move(objects: Iterable[Any], device: torch.device, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Move the memory of all tensors of some objects; each one that is moved is added to `moved` with its former memory."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in {id(tensor): tensor for obj in objects for tensor in _tensors(obj)}.values():
                before = tensor.data
                there = before.to(device)
                if there is not before and there.device != before.device:
                    moved.append((tensor, before))
                    tensor.data = there
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: a PyTorch without such a device
        reason = in_one_line(error)
    else:
        return
    raise UndiagnosableError(f"the model cannot be moved to {device}, where its fit would run ({reason})")


def _tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that fastai moves of a model or a loss: parameters and buffers, for its own losses their function's."""
    losses: Any = sys.modules.get("fastai.losses")
    bases = mro_of(type(obj))
    module = obj.func if losses is not None and losses.BaseLoss in bases else obj
    if nn.Module not in mro_of(type(module)):
        return
    for tensor in (*module.parameters(), *module.buffers()):
        is_empty = isinstance(tensor, nn.parameter.UninitializedTensorMixin)
        if not is_empty and tensor.device.type != "meta" and tensor.layout is torch.strided:
            yield tensor
