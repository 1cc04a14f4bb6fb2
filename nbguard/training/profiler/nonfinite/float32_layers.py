"""Layers that compute in float32 while a fit computes in float16, and the trial that shows whether it helps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from nbguard.errors import NbguardError
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.graphs import sequence_of
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.memory.scan.parked import name_in_model
from nbguard.training.profiler.analysis.nonfinite import Origin
from nbguard.training.profiler.analysis.operations import Float32Trial
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, NotPossibleError

# --- The loss without a backward pass, because the user's own check for NaN left the batch before it.


def loss_of_learner(learner: Any) -> Any:
    """Return the latest loss of a Learner that trains; None where it has none."""
    return attribute_of(learner, "loss_grad") if attribute_of(learner, "training") is True else None


def losses_left(torch: Any, error: BaseException | None, since: int) -> Iterator[Any]:
    """Yield single numbers with a graph, first in the user's frames that an error left, then among the names of cells.

    `since`: number of the operation before the first of them. `error` ended the fit, or is None.
    """
    for namespace in (*_frames(error), vars(sys.modules["__main__"])):
        for value in [*namespace.values()]:
            is_number = type(value) is torch.Tensor and not value.dim() and value.is_floating_point()
            if is_number and value.grad_fn is not None and sequence_of(value.grad_fn) >= since:
                yield value


def _frames(error: BaseException | None) -> Iterator[dict[str, Any]]:
    """Yield the names of the user's frames that an error left, the innermost first."""
    sites, left = Sites(), []
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        if sites.is_users(trace.tb_frame.f_code.co_filename):
            left.append(trace.tb_frame)
        trace = trace.tb_next
    yield from (frame.f_locals for frame in reversed(left))


_MOST = 4
"""Layers that are tried together: where it takes more, the model as a whole does not fit the type."""


def tried_in_float32(
    torch: Any, module: Any, call: ForwardCall, origin: Origin, search: Callable[[], Origin | None]
) -> Float32Trial | None:
    """Return the result, or None where no layer made the value. The model is as before.

    Args:
        torch: the library.
        module: the model that was called.
        call: that call, whose arguments are still there.
        origin: the layer, or the code around it.
        search: runs the forward pass again and returns the first layer that makes a value which is not finite, if there is one.
    """
    if origin.kind not in ("layer", "code"):
        return None
    dtype = _dtype(torch, module, call, origin.name)
    if dtype not in ("float16", "bfloat16"):
        return Float32Trial(dtype=dtype, note=f"it computes in {dtype} already")
    layers, types, largest = [origin.name], [origin.type], [math.nan]
    try:
        while True:
            with Float32Layers(module, *layers), _largest_of(torch, module, layers[0], largest):
                following = search()
            if following is None or following.name in layers or len(layers) == _MOST:
                break
            if following.kind not in ("layer", "code"):
                break
            layers.append(following.name)
            types.append(following.type)
    except (NotPossibleError, NbguardError) as error:
        return Float32Trial(dtype=dtype, note=str(error))
    reached = largest[0] if math.isfinite(largest[0]) else None
    return Float32Trial(dtype=dtype, layers=tuple(layers), is_finite=following is None, largest=reached, types=tuple(types))


def _dtype(torch: Any, module: Any, call: ForwardCall, name: str) -> str:
    """Return the type that a layer computed in: autocast's, or its parameters', or the model's."""
    kind = call.autocast[1]
    if kind is None:
        modules = {name_in_model(path): part for path, part in module.named_modules()}
        values = [*modules.get(name, module).parameters(), *module.parameters()]
        kind = next((value.dtype for value in values if value.is_floating_point()), torch.float32)
    return str(kind).removeprefix("torch.")


@contextmanager
def _largest_of(torch: Any, module: Any, name: str, largest: list[float]) -> Iterator[None]:
    """Keep the largest magnitude that a layer returns meanwhile."""

    def look(_: Any, __: Any, output: Any) -> None:
        values = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if torch.Tensor in mro_of(type(leaf))]
        sizes = [float(value.detach().abs().amax()) for value in values if value.is_floating_point() and value.numel()]
        largest[0] = max(sizes, default=math.nan)

    layer = next(part for path, part in module.named_modules() if name_in_model(path) == name)
    handle = layer.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


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
        """Return the parts for a pickle or a copy: the layer's own class, which this one is made from again."""
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
        The handle that takes it back by `undo()`; also a context manager.

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
