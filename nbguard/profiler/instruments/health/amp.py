"""Mixed precision: autocast's dtype, and the scale of every GradScaler, fastai's too."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from nbguard.profiler.analysis.health.amp import AmpFacts, ScalerFacts
from nbguard.profiler.instruments.health.autocast import autocast_dtypes
from nbguard.profiler.instruments.nonfinite.async_scalars import AsyncScalars
from nbguard.profiler.record.patches import Patches
from nbguard.profiler.record.recorder import Recorder
from nbguard.scan.heap.attributes import attribute_of, attributes_of
from nbguard.scan.heap.autograd import Autograd
from nbguard.scan.heap.kinds import Kinds, mro_of

_MULTIPLIES = "MulBackward0"
_FACTORS = (_MULTIPLIES, "DivBackward0")
_LINEAR = (*_FACTORS, "MeanBackward0", "SumBackward0", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0", "NegBackward0")
"""Operations after a loss that do no more than scale it."""
_DEEPEST = 8
"""Of these in a row that are looked at."""
_SCALED = 16
"""Factor from which a loss is multiplied to keep its gradients in range, and not to weigh it."""
_KEPT = 1000
"""Changes of a scale that are kept."""


class _Scaler:
    """The state of one GradScaler so far."""

    def __init__(self, scaler: Any) -> None:
        attributes = attributes_of(scaler) or {}
        self.of = weakref.ref(scaler)
        self.initial = self.last = float(attributes.get("_init_scale", 1.0))
        self.growth, self.backoff = float(attributes.get("_growth_factor", 0)), float(attributes.get("_backoff_factor", 0))
        self.interval = int(attributes.get("_growth_interval", 0))
        self.updates = self.idle = 0
        self.optimizers = 1
        self.is_static = False
        self.scales: list[tuple[int, float]] = []
        self.skipped: list[int] = []

    def is_now(self, update: int, is_told: bool, values: tuple[float, ...]) -> None:
        """Take a scale down: `values` after the update of this number.

        `is_told`: which steps were skipped is told otherwise; else the scale has fallen by them, or can fall no further.
        """
        (scale,) = values
        if scale != self.last and len(self.scales) < _KEPT:
            self.scales.append((update, scale))
        if not is_told and (scale < self.last or scale == 0 or not math.isfinite(scale)):
            self.skipped.append(update)
            self.idle += 1
        self.last = scale

    def were_infinite(self, update: int, is_added_up: bool, values: tuple[float, ...]) -> None:
        """Take down which optimizers had gradients that were not finite; with `is_added_up` the first value is the sum."""
        first = values[0] - sum(values[1:]) if is_added_up else values[0]
        is_skipped = [value > 0 for value in (first, *values[1:])]
        if any(is_skipped):
            self.skipped.append(update)
            self.idle += all(is_skipped)

    def facts(self) -> ScalerFacts:
        scales, skipped = tuple(self.scales), tuple(self.skipped)
        return ScalerFacts(
            initial=self.initial,
            growth=self.growth,
            backoff=self.backoff,
            interval=self.interval,
            updates=self.updates,
            scales=scales,
            skipped=skipped,
            idle=self.idle,
            optimizers=self.optimizers,
            is_static=self.is_static,
        )


class AmpWatch:
    """Follows the scales. Those on a device are read late, without waiting for it."""

    watches = "scales of mixed precision"

    def __init__(self) -> None:
        self._patches = Patches()
        self._scalers: list[_Scaler] = []
        self._batches: Counter[str] = Counter()
        self._dtype = "float32"
        self._by_hand = 0
        self._autograd, self._kinds = Autograd(), Kinds()

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        import torch

        self._torch: Any = torch
        self._recorder = recorder
        self._arriving = AsyncScalars(torch)
        self._names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
        self._patches.put(torch.amp.GradScaler, "update", self._update)
        recorder.subscribe("forward", self._forward)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("scale", self._scale)

    def stop(self) -> None:
        """Take the patch out, and read the values that have arrived."""
        self._patches.restore()
        self._arriving.poll()

    def observe(self) -> AmpFacts:
        """Return the dtypes and the scales that were seen."""
        scalers = tuple(scaler.facts() for scaler in self._scalers)
        return AmpFacts(tuple(self._batches.items()), scalers, self._by_hand)

    def _forward(self, _module: Any, _args: Any) -> None:
        on = next(iter(autocast_dtypes(self._torch).values()), None)
        self._dtype = self._names.get(on, "float32")

    def _loss(self, tensors: Any) -> None:
        self._batches[self._dtype] += 1
        if self._dtype == "float16" and not self._scalers and self._kinds.of(type(tensors)) == "tensor":
            self._by_hand += _is_scaled(self._autograd.grad_fn(tensors))
        self._arriving.poll()

    def _update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def update(scaler: Any, new_scale: Any = None) -> Any:
            __tracebackhide__ = True
            is_fits = get_ident() == recorder.thread
            found = _found_infinite(scaler) if is_fits else []  # the update forgets them
            result = original(scaler, new_scale)
            if is_fits:
                recorder.emit("scale", scaler, new_scale is not None, found)
            return result

        return update

    def _scale(self, scaler: Any, is_given: bool, found: list[Any]) -> None:
        tensor = attribute_of(scaler, "_scale")
        if tensor is None:  # it is off
            return
        known = next((watched for watched in self._scalers if watched.of() is scaler), None)
        if known is None:
            known = _Scaler(scaler)
            self._scalers.append(known)
        known.updates += 1
        known.is_static |= is_given
        known.optimizers = max(known.optimizers, len(found))
        is_told = bool(found) and (is_given or len(found) > 1) and all(flag.device == tensor.device for flag in found)
        if is_told:
            flags = self._torch.stack([flag.detach().reshape(()) for flag in found])
            self._arriving.read(flags, partial(known.were_infinite, known.updates, not is_given and len(found) > 1))
        self._arriving.read(tensor, partial(known.is_now, known.updates, is_told or is_given))


def _is_scaled(node: Any) -> bool:
    """Say whether the graph of a loss ends with factors that scale it. One of a device is not read: it may be any."""
    factor = 1.0
    for _ in range(_DEEPEST):
        name = type(node).__name__
        children = [child for child, _ in node.next_functions if child is not None] if name in _LINEAR else []
        if len(children) != 1:
            break
        if name in _FACTORS:
            is_first = node.next_functions[0][0] is not None
            saved = node._raw_saved_other if is_first else node._raw_saved_self
            if saved.unpack_hook is not None or not saved.data.is_cpu or saved.data.numel() != 1:
                return name == _MULTIPLIES
            value = float(saved.data)
            factor *= value if name == _MULTIPLIES else 1 / (value or 1)
        (node,) = children
    return abs(factor) >= _SCALED


def _found_infinite(scaler: Any) -> list[Any]:
    """Return for each optimizer the flag that its gradients were not finite; an empty list where one has several flags."""
    states = attribute_of(scaler, "_per_optimizer_states")
    if dict not in mro_of(type(states)):
        return []
    flags = [list(dict.values(state["found_inf_per_device"])) for state in dict.values(states)]
    return [flag for (flag,) in flags] if all(len(each) == 1 for each in flags) else []
