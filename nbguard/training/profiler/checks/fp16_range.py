"""The range of float16 while a fit computes in it, with the largest activation by layer, and the zeros among gradients."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of, name_of
from nbguard.memory.scan.parked import has_compiled, name_in_model
from nbguard.texts import STOP_OPTION
from nbguard.training.profiler.analysis.operations import LARGEST, module_words
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.amp import autocast_dtypes
from nbguard.training.profiler.checks.check import AsyncScalars, FitFigures
from nbguard.training.profiler.checks.optimizer_facts import groups_of
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import counted

SMALLEST_NORMAL = 2.0**-14
"""Smallest float16 with all of its digits; below it they get fewer, and below 6e-8 a value is 0."""
_NEAR = 0.25
"""Share of float16's largest number that is worth a warning: two more doublings, and it is infinite."""
_LOST = 0.3
"""Share of zeros among values that neither a dead row nor a dead column explains."""
_COARSE = 0.5
"""Share of the other values that are that small: a few always are."""


@dataclass(frozen=True, slots=True)
class LargestActivation:
    """The largest magnitude that a layer returned in float16, of the sampled batches."""

    layer: str  # its name in the model; "": the model
    value: float  # magnitude
    type: str = ""  # of the layer; "": not known


@dataclass(frozen=True, slots=True)
class LostGradients:
    """The zeros of one parameter's gradient, in the step with most of them."""

    parameter: str  # its name in the model; "": not known
    zeros: float  # share, of the values whose row and column have others than zeros
    coarse: float  # share of the others that lie below float16's smallest number with all digits, by the scale of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFacts:
    """The looks at float16's range during a fit."""

    batches: int = 0  # with sampled activations
    steps: int = 0  # with gradients sampled before
    largest: LargestActivation | None = None  # None if nothing computed in float16
    lost: LostGradients | None = None  # None if no sampled gradient had others than zeros
    gradients: int = 0  # of parameters, that were sampled
    empty: int = 0  # of them: those that were zero throughout


def range_findings(facts: RangeFacts) -> tuple[FitFinding, ...]:
    """Return a warning where a layer comes near the end of float16's range, and where gradients vanish."""
    return (*_near_the_end(facts), *_vanishing(facts))


def _near_the_end(facts: RangeFacts) -> Iterator[FitFinding]:
    largest, limit = facts.largest, LARGEST["float16"]
    if largest is None or largest.value < _NEAR * limit:
        return
    layer = module_words(largest.layer, largest.type)
    yield FitFinding(
        kind="range",
        severity="advice",
        what=f"{layer} comes close to the limit of float16; it returned {largest.value:,.0f}, and the limit is {limit:,.0f}",
        evidence=f"the largest magnitude in {facts.batches} sampled batches; above the limit a value becomes infinite",
        change=(
            "compute in bfloat16, or normalise the layer's input; "
            + STOP_OPTION
            + " stops before infinity reaches the parameters"
        ),
    )


def _vanishing(facts: RangeFacts) -> Iterator[FitFinding]:
    lost, what = facts.lost, ""
    is_coarse = lost is not None and lost.coarse >= _COARSE
    if lost is not None and is_coarse and lost.zeros >= _LOST:
        parameter = f"`{lost.parameter}`" if lost.parameter else "a parameter"
        what = f"{lost.zeros:.0%} of the gradient of {parameter} is zero because float16 is too coarse for it"
    elif facts.empty and (is_coarse or facts.empty == facts.gradients):
        what = f"{facts.empty} of {facts.gradients} sampled gradients are all zero because float16 is too coarse"
    if what:
        others = "" if lost is None else f"{lost.coarse:.0%} of the other values lie below {SMALLEST_NORMAL:.1e}; "
        yield FitFinding(
            kind="range",
            severity="advice",
            what=what,
            evidence=f"{others}there float16 loses digits, and below 6e-8 all of them (seen in {counted(facts.steps, 'step')})",
            change="a larger scale of the loss (`torch.amp.GradScaler(init_scale=2.0**20)`), or bfloat16",
        )


_Module = tuple[str, str]  # name in the model, and name of its class

_SHARE = 0.0005
"""Share of the time between two looks that one may take, for activations and for gradients each."""
_VALUES = 2**18
"""Values of one gradient that are sampled."""
_PARAMETERS = 4
"""Parameters whose gradients are sampled in one step, in turn."""


class RangeWatch:
    """Looks at a forward pass, and before a step at gradients, of few batches, and only where these compute in float16.

    Values of a device are read late, without waiting for it. Nothing is put up where a model is compiled.
    """

    watches = "the range of float16"
    name = "fp16"
    facts = RangeFacts

    def __init__(self) -> None:
        self._largest: LargestActivation | None = None
        self._lost: LostGradients | None = None
        self._batches = self._steps = self._losses = self._place = self._gradients = self._empty = 0
        self._next_check = {"forward": 0, "step": 0}
        self._hook: Any = None
        self._paths: dict[int, _Module] = {}
        self._seen: list[tuple[_Module, Any]] = []
        self._spent = 0
        self._is_half = False
        self._scaler: weakref.ref[Any] | None = None
        self._model: weakref.ref[Any] | None = None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        torch: Any = sys.modules["torch"]
        self._torch = torch
        self._recorder = recorder
        self._arriving = AsyncScalars(torch)
        recorder.subscribe("batch", self._batch)
        recorder.subscribe("forward", self._forward)
        recorder.subscribe("loss", self._loss)
        recorder.subscribe("step", self._step)
        recorder.subscribe("scale", self._scale)

    def stop(self) -> None:
        """Take the hook down, and read the numbers that arrived."""
        self._end_check()
        self._arriving.poll()
        self._model = self._scaler = None

    def observe(self) -> RangeFacts:
        """Return the observations."""
        return RangeFacts(
            batches=self._batches,
            steps=self._steps,
            largest=self._largest,
            lost=self._lost,
            gradients=self._gradients,
            empty=self._empty,
        )

    @staticmethod
    def diagnose(facts: RangeFacts, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the warnings; none where all steps were skipped, whose gradients say nothing."""
        return () if "not trained" in fit.kinds else range_findings(facts)

    def _batch(self, _: int) -> None:
        self._end_check()

    def _forward(self, module: Any, _: Any) -> None:
        torch = self._torch
        self._end_check()
        if not torch.is_grad_enabled():
            return
        half = torch.float16
        self._is_half = half in autocast_dtypes(torch).values()
        if not self._is_half:
            first = next(iter(module.parameters()), None)
            self._is_half = first is not None and first.dtype is half
        if not self._is_half or self._recorder.clock() < self._next_check["forward"] or has_compiled():
            return
        begun = self._recorder.clock()
        self._model = weakref.ref(module)
        self._paths = {id(part): (name_in_model(name), name_of(type(part))) for name, part in module.named_modules()}
        self._hook = torch.nn.modules.module.register_module_forward_hook(self._look)
        self._spent = self._recorder.clock() - begun

    def _look(self, module: Any, _: Any, output: Any) -> None:
        if get_ident() != self._recorder.thread:
            return
        path = self._paths.get(id(module))
        if path is None or type(output) is not self._torch.Tensor or output.dtype is not self._torch.float16:
            return
        self._recorder.aside(self, "look", self._note, path, output)

    def _note(self, path: _Module, output: Any) -> None:
        begun = self._recorder.clock()
        if output.numel():
            with self._torch.no_grad():
                self._seen.append((path, self._torch.linalg.vector_norm(output.detach(), math.inf)))
        self._spent += self._recorder.clock() - begun

    def _loss(self, _: Any) -> None:
        self._losses += 1
        begun = self._recorder.clock()
        self._arriving.poll()
        seen = self._seen
        self._end_check()
        if seen:
            for device in {value.device for _, value in seen}:
                alike = [(path, value) for path, value in seen if value.device == device]
                with self._torch.no_grad():
                    values = self._torch.stack([value for _, value in alike])
                self._arriving.read(values, partial(self._activations_are, [path for path, _ in alike]))
            self._batches += 1
            now = self._recorder.clock()
            self._spent += now - begun
            self._next_check["forward"] = now + int(self._spent / _SHARE)

    def _end_check(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._seen, self._paths = [], {}

    def _activations_are(self, paths: list[_Module], values: tuple[float, ...]) -> None:
        for path, value in zip(paths, values, strict=True):
            is_mask = value >= LARGEST["float16"]  # the largest number itself, and infinity, stand for "not at all" in masks
            if math.isfinite(value) and not is_mask and (self._largest is None or value > self._largest.value):
                self._largest = LargestActivation(path[0], value, path[1])

    def _scale(self, scaler: Any, *_: Any) -> None:
        self._scaler = weakref.ref(scaler)

    def _step(self, optimizer: Any) -> None:
        self._arriving.poll()
        begun = self._recorder.clock()
        if (
            not self._is_half or begun < self._next_check["step"] or self._losses < 2
        ):  # a scaler is known from its first update on
            return
        parameters = [p for group in groups_of(optimizer) for p in group.parameters if self._is_matrix(p)]
        for _ in range(min(_PARAMETERS, len(parameters))):
            self._place += 1
            self._look_at_gradient(parameters[self._place % len(parameters)], optimizer)
        self._steps += bool(parameters)
        now = self._recorder.clock()
        self._next_check["step"] = now + int((now - begun) / _SHARE)

    def _is_matrix(self, parameter: Any) -> bool:
        gradient, torch = parameter.grad, self._torch
        return (
            type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dim() > 1 and gradient.numel() > 0
        )

    def _look_at_gradient(self, parameter: Any, optimizer: Any) -> None:
        """Count the zeros that no dead row or column explains: a row or column is of one output or one input."""
        torch, gradient = self._torch, parameter.grad
        with torch.no_grad(), torch._C.DisableTorchFunction():
            columns = min(gradient[0].numel(), _VALUES)
            part = gradient.detach().reshape(len(gradient), -1)[: max(1, _VALUES // columns), :columns]
            sizes = part.abs().float()
            others = sizes != 0
            living = others.any(0).sum() * others.any(1).sum()
            zeros = (living - others.sum()) / living.clamp_min(1)
            count = others.sum()
            coarse = (sizes * self._scale_of(optimizer, sizes) < SMALLEST_NORMAL).sum() - (sizes.numel() - count)
            values = torch.stack([zeros.float(), coarse / count.clamp_min(1), count.float()])
        self._arriving.read(values, partial(self._gradient_is, weakref.ref(parameter)))

    def _scale_of(self, optimizer: Any, like: Any) -> Any:
        """Return the factor that unscaled the gradients, which only float16 itself does not show."""
        scaler = None if self._scaler is None else self._scaler()
        scale = attribute_of(scaler, "_scale")
        is_scaled = attribute_of(optimizer, "grad_scale") is not None
        if scale is None or is_scaled or scale.device != like.device:
            return 1.0
        return scale.detach().reshape(())

    def _gradient_is(self, of: weakref.ref[Any], values: tuple[float, ...]) -> None:
        zeros, coarse, count = values
        self._gradients += 1
        if not count:
            self._empty += 1
        elif math.isfinite(coarse) and (self._lost is None or zeros > self._lost.zeros):
            self._lost = LostGradients(self._name_of(of()), zeros, coarse)

    def _name_of(self, parameter: Any) -> str:
        model = None if self._model is None else self._model()
        if model is None or parameter is None:
            return ""
        return next((name_in_model(name) for name, one in model.named_parameters() if one is parameter), "")
