"""Layers of a model that compute in float32 while the rest computes in a smaller type: by a class of their own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from nbguard.errors import NbguardError
from nbguard.scan.heap.attributes import attribute_of
from nbguard.scan.heap.kinds import mro_of
from nbguard.scan.objects.compiled import name_in_model

_SMALL = (torch.float16, torch.bfloat16)


class Float32Layer(nn.Module):  # type: ignore[misc]
    """The part of a layer's class that makes its `forward` compute in float32; the layer's own class comes after it.

    The names of parameters and buffers stay as they are, and so does a checkpoint.
    """

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the layer's own `forward` outside of autocast, with float32 inputs and parameters.

        Under autocast the result stays in float32. A layer whose own parameters are of a smaller type returns that type.
        """
        first = next((value for value in _tensors((args, named)) if value.is_floating_point()), None)
        kind = "cpu" if first is None else first.device.type
        is_autocast = torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        args, named = _mapped(args, _widened), _mapped(named, _widened)
        if is_autocast:
            with torch.autocast(kind, enabled=False):
                return self._called(args, named)
        result = self._called(args, named)
        if first is None or first.dtype not in _SMALL:
            return result
        return _mapped(result, lambda value: value.to(first.dtype) if value.dtype is torch.float32 else value)

    def _called(self, args: Any, named: Any) -> Any:
        small = {name: value.float() for name, value in self._small()}
        if not small:
            return super().forward(*args, **named)
        wide = {f"layer.{name}": value for name, value in small.items()}
        return torch.func.functional_call(_OwnForward(self), wide, args, named, tie_weights=False)

    def _small(self) -> list[tuple[str, Any]]:
        """Return the parameters and buffers of a smaller type, by their names."""
        return [(name, value) for name, value in (*self.named_parameters(), *self.named_buffers()) if value.dtype in _SMALL]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a pickle or a copy needs: the layer's own class, from which this one is made again."""
        return _made_again, (type(self).__mro__[2],), *super().__reduce_ex__(2)[2:]


class _OwnForward(nn.Module):  # type: ignore[misc]
    """The `forward` that a layer has of its own, for one call with other parameters."""

    def __init__(self, layer: Float32Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **named: Any) -> Any:
        return super(Float32Layer, self.layer).forward(*args, **named)


def _class_of(own: type) -> type:
    """Return the class of a layer that computes in float32, by its own class; it is made once."""
    derived: list[type] = type.__subclasses__(own)
    known = next((cls for cls in derived if cls.__mro__[1] is Float32Layer), None)
    if known is not None:
        return known
    return type(f"Float32{own.__name__}", (Float32Layer, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _made_again(own: type) -> Any:
    return object.__new__(_class_of(own))


class Float32Layers:
    """Layers of one model that compute in float32 from now on, until `undo`; also as a context manager."""

    def __init__(self, model: Any, *paths: str) -> None:
        if torch.nn.Module not in mro_of(type(model)):
            model = attribute_of(model, "model")  # a Learner's
        if torch.nn.Module not in mro_of(type(model)):
            raise NbguardError("in_float32 takes a model or a Learner, and the names of layers, as in model.named_modules()")
        if not paths:
            raise NbguardError("name the layers that are to compute in float32, as in  nbguard.in_float32(model, 'layers.3')")
        modules = {name_in_model(name): module for name, module in model.named_modules()}
        unknown = [path for path in paths if path not in modules]
        if unknown:
            raise NbguardError(f"the model has no layer {unknown[0]!r}: model.named_modules() lists their names")
        layers = [modules[path] for path in paths]
        if any(torch.jit.ScriptModule in mro_of(type(layer)) for layer in layers):
            raise NbguardError("a ScriptModule runs without Python: change the model that it was made of")
        self._layers = [layer for layer in layers if Float32Layer not in mro_of(type(layer))]
        for layer in self._layers:
            layer.__class__ = _class_of(type(layer))

    def undo(self) -> None:
        """Let the layers compute as they did before."""
        while self._layers:
            layer = self._layers.pop()
            if type(layer).__mro__[1] is not Float32Layer:
                raise NbguardError(
                    f"a {type(layer).__name__} was made of the layer since: take that back first, for a parametrization by "
                    "torch.nn.utils.parametrize.remove_parametrizations"
                )
            layer.__class__ = type(layer).__mro__[2]

    def __enter__(self) -> Float32Layers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def in_float32(model: Any, *layers: str) -> Float32Layers:
    """Make layers of a model compute in float32, also under autocast and where their parameters are of a smaller type.

    The layers get a class that is derived from theirs: parameters, hooks and the names in a checkpoint stay as they are.

    Args:
        model: a torch module, or a Learner.
        layers: names as in `model.named_modules()`; everything inside of a named module computes in float32, too.

    Returns:
        What takes it back by `undo()`; also a context manager.

    Raises:
        NbguardError: the model has no such layer.
    """
    return Float32Layers(model, *layers)


def _widened(value: Any) -> Any:
    return value.float() if value.dtype in _SMALL else value


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if torch.Tensor in mro_of(type(leaf))]


def _mapped(value: Any, act: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, act, value)
