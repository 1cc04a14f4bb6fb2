"""The layer that made a NaN, tried in float32 on the batch that failed; then those that come after it, as far as it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbguard.errors import NbguardError
from nbguard.profiler.analysis.health.float32 import Float32Trial
from nbguard.profiler.analysis.health.nonfinite import Origin
from nbguard.profiler.instruments.nonfinite.float32_layers import Float32Layers
from nbguard.profiler.instruments.nonfinite.rerun import ForwardCall, NotPossibleError
from nbguard.scan.heap.kinds import mro_of
from nbguard.scan.objects.compiled import name_in_model

_MOST = 4
"""Layers that are tried together: where it takes more, the model as a whole does not fit the type."""


def tried_in_float32(
    torch: Any, module: Any, call: ForwardCall, origin: Origin, search: Callable[[], Origin | None]
) -> Float32Trial | None:
    """Return what came of it; None where no layer made the value. The model is as before.

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
    """Return the type in which a layer computed: autocast's, or that of its parameters, or of the model's."""
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
