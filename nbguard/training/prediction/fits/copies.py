"""Copies of models, optimizers and training code whose tensors have no data. The originals are read, and stay as they are."""

from __future__ import annotations

import ast
import copy
import copyreg
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbguard.errors import UnpredictableError, in_one_line


class _Copying(TorchFunctionMode):  # type: ignore[misc]
    """Makes copies of tensors by another way than their own while a deep copy is taken."""

    def __init__(self, memo: dict[int, Any], make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._memo, self._make = memo, make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor = args[0]
            if id(tensor) not in self._memo:
                self._memo[id(tensor)] = self._make(tensor)
            return self._memo[id(tensor)]
        if func is torch.Tensor.clone:  # a parameter copies itself by this
            return self._make(args[0])
        return func(*args, **(kwargs or {}))


def without_data(tensor: Any) -> Any:
    """Return a tensor of the same kind, shape and strides on the meta device, in a storage of its own.

    Raises:
        UnpredictableError: it is no plain tensor (sparse, quantised, a wrapper of others, not initialised yet).
    """
    if tensor.layout != torch.strided or tensor.is_quantized or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnpredictableError(f"a {kind} tensor ({type(tensor).__name__}) needs real data")
    with torch._C.DisableTorchFunction():
        plain = torch.empty_like(tensor.detach(), device="meta", memory_format=torch.preserve_format)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            plain = plain.as_subclass(type(tensor))
        return plain.requires_grad_(tensor.requires_grad)


@contextmanager
def _counters_can_be_copied() -> Iterator[None]:
    """Let `itertools.count` (the step counter of loops) be copied meanwhile, as from Python 3.14 on it cannot be."""
    known = copyreg.dispatch_table.get(itertools.count)
    copyreg.dispatch_table[itertools.count] = known or _count_again
    try:
        yield
    finally:
        if known is None:
            copyreg.dispatch_table.pop(itertools.count, None)


def _count_again(counter: itertools.count[Any]) -> tuple[Any, ...]:
    """Return a maker of a counter at the same count, which its text alone tells."""
    numbers = [each for each in gc.get_referents(counter) if each is not itertools.count]
    if any(type(number) not in (int, float) for number in numbers):
        raise TypeError("a counter of numbers other than int and float cannot be copied")
    return itertools.count, tuple(ast.literal_eval(f"[{repr(counter)[len('count(') : -1]}]"))


def copied(obj: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `obj` whose tensors have no data. `memo` goes by the ids of objects, as `copy.deepcopy` has it.

    Raises:
        UnpredictableError: something in it cannot be copied; the message says what.
    """
    return _copied(obj, memo, without_data)


def copied_to_host(obj: Any, memo: dict[int, Any]) -> Any:
    """Return the same with tensors on the host: those that are small and there already with their numbers.

    Raises:
        UnpredictableError: as of `copied`.
    """
    return _copied(obj, memo, host_copy)


def copied_beside_model(obj: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of objects used next to a model that `memo` has already; tensors on the host stay there.

    Raises:
        UnpredictableError: as of `copied`.
    """
    return _copied(obj, memo, lambda tensor: host_copy(tensor) if tensor.device.type == "cpu" else without_data(tensor))


def _copied(obj: Any, memo: dict[int, Any], make: Callable[[Any], Any]) -> Any:
    try:
        with _Copying(memo, make), _counters_can_be_copied():
            return copy.deepcopy(obj, memo)
    except UnpredictableError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the copy of a user's object raises is the reason
        reason = in_one_line(error)
    raise UnpredictableError(f"{type(obj).__name__} cannot be copied to be tried without data ({reason})")


def in_order_of_moving(model: Any) -> list[Any]:
    """Return the parameters and buffers of a model in the order of `model.to(device)`, each once."""
    tensors: dict[int, Any] = {}

    def visit(module: Any) -> None:
        for child in module.children():
            visit(child)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors.setdefault(id(tensor), tensor)

    visit(model)
    return list(tensors.values())


def tensors_of_models(models: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters, buffers and gradients of models."""
    for model in models:
        for tensor in in_order_of_moving(model):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad


def device_of(models: Iterable[Any]) -> str:
    """Return the kind of device on which models are: that of the first parameter which is not on the host."""
    kinds = {tensor.device.type for model in models for tensor in in_order_of_moving(model)}
    return next(iter(sorted(kinds - {"cpu"})), "cpu")


_SMALL = 2**20


def host_copy(tensor: Any) -> Any:
    """Return a tensor of the host like this one: the same numbers where it is small, else zeros, which take no memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _SMALL:
            own = tensor.detach().clone()
        else:
            own = torch.zeros(tensor.shape, dtype=tensor.dtype)
        own = own if type(tensor) in (torch.Tensor, torch.nn.Parameter) else own.as_subclass(type(tensor))
        return own.requires_grad_(tensor.requires_grad)


@dataclass(kw_only=True)
class CopiedCode:
    """Code that runs without data, and the objects it refers to."""

    namespace: dict[str, Any]  # the copy's globals
    names: tuple[str, ...]  # of its models, then of its optimizers
    models: tuple[Any, ...]  # copied modules that it refers to
    optimizers: tuple[Any, ...]  # copied optimizers that it refers to

    @property
    def has_optimizer(self) -> bool:
        """Return whether the code refers to an optimizer of PyTorch's."""
        return bool(self.optimizers)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the models, then the optimizers' state."""
        yield from chain.from_iterable(map(in_order_of_moving, self.models))
        for optimizer in self.optimizers:
            yield from state_of(optimizer)

    def change(self, code: str) -> None:
        """Run lines that change the models and optimizers, by their names, where the code finds them."""
        for name, value in zip(self.names, (*self.models, *self.optimizers), strict=True):
            self.namespace.setdefault(name, value)
        exec(code, self.namespace)  # noqa: S102 - our own lines, the same that are shown


def state_of(optimizer: Any) -> Iterable[Any]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
