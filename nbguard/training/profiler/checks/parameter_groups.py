"""The parameter groups of an optimizer, torch's or fastai's, and signs that its steps train something."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of
from nbguard.training.profiler.checks.async_scalars import AsyncScalars
from nbguard.training.profiler.checks.optimizer_facts import NEGLIGIBLE, SMALL, RateFacts


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share settings. It is made for one sample, and not kept."""

    parameters: tuple[Any, ...]
    settings: Mapping[str, Any]


def torchs(optimizer: Any) -> Any | None:
    """Return the optimizer of torch, also out of fastai's wrapper; None of fastai's own."""
    torch: Any = sys.modules["torch"]
    if torch.optim.Optimizer in mro_of(type(optimizer)):
        return optimizer
    inner = attribute_of(optimizer, "opt")
    return inner if torch.optim.Optimizer in mro_of(type(inner)) else None


def stepping(optimizer: Any) -> Any:
    """Return the optimizer inside one that is of torch's classes by name only, as Lightning's are; any other as it is."""
    inner = attribute_of(optimizer, "_optimizer")
    return inner if sys.modules["torch"].optim.Optimizer in mro_of(type(inner)) else optimizer


def groups_of(optimizer: Any) -> list[Group]:
    """Return the groups of an optimizer; an empty list for an unknown kind of optimizer."""
    inner = torchs(optimizer)
    if inner is not None:
        return [Group(tuple(group["params"]), group) for group in inner.param_groups]
    lists, hypers = attribute_of(optimizer, "param_lists"), attribute_of(optimizer, "hypers")
    if lists is None or hypers is None:
        return []
    return [Group(tuple(parameters), settings) for parameters, settings in zip(lists, hypers, strict=False)]


def fusible(optimizer: Any, groups: list[Group]) -> str:
    """Return torch's class that does the same as an optimizer with `fused=True`; empty if it is fused, or none is known."""
    inner = torchs(optimizer)
    if inner is None:
        return _LIKE_FASTAI.get(_steppers(optimizer), "")
    is_fused = any(group.settings.get("fused") is True for group in groups)
    is_floating = all(parameter.is_floating_point() for group in groups for parameter in group.parameters)
    return "" if is_fused or not is_floating or "fused" not in _arguments(type(inner)) else name_of(type(inner))


def is_looped(optimizer: Any, groups: list[Group]) -> bool:
    """Say whether an optimizer of torch's was told to step its parameters one by one."""
    inner = torchs(optimizer)
    is_told = any(group.settings.get("foreach") is False for group in groups)
    return inner is not None and is_told and "foreach" in _arguments(type(inner))


_LIKE_FASTAI = {
    frozenset(("weight_decay", "adam_step")): "AdamW",
    frozenset(("l2_reg", "adam_step")): "Adam",
    frozenset(("weight_decay", "sgd_step")): "SGD",  # without momentum both decays are alike
    frozenset(("l2_reg", "sgd_step")): "SGD",
    frozenset(("l2_reg", "momentum_step")): "SGD",
}
"""torch's optimizers that step as fastai's own do, by the functions that these call."""


def _steppers(optimizer: Any) -> frozenset[str]:
    """Return the names of the functions of fastai's that make a step, averages apart."""
    functions = attribute_of(attribute_of(optimizer, "cbs"), "items")
    names = (function.__name__ for function in functions if type(function) is FunctionType) if type(functions) is list else ()
    return frozenset(name for name in names if not name.startswith(("average", "step_stat")))


def _arguments(cls: type) -> tuple[str, ...]:
    """Return the names of the arguments that a class is made with."""
    make = next((vars(base)["__init__"] for base in mro_of(cls) if "__init__" in vars(base)), None)
    if type(make) is not FunctionType:
        return ()
    return make.__code__.co_varnames[: make.__code__.co_argcount + make.__code__.co_kwonlyargcount]


_SMALL = 4096
"""Values of a parameter that is compared: all of them are."""
_FEW = 8
"""Parameters that are compared, spread over all small ones;"""
_LOOKS = 6
"""and looks at them without any change. None follows the first change."""


class Values:
    """Compares small parameters before and after steps. It holds copies only between the two."""

    def __init__(self) -> None:
        self.changed = self.unchanged = 0
        self._before: list[tuple[weakref.ref[Any], Any]] = []

    @property
    def is_wanted(self) -> bool:
        """Say whether it is still open if anything changes."""
        return not self.changed and self.unchanged < _LOOKS

    def keep(self, torch: Any, parameters: Sequence[Any]) -> None:
        """Copy values, before a step."""
        self._before = []
        small = [p for p in parameters if _is_small(torch, p)] if self.is_wanted else []
        if not small or (small[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        alike = [p for p in small if p.device == small[0].device]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._before = [(weakref.ref(p), p.detach().clone()) for p in alike[:: -(-len(alike) // _FEW)]]

    def compare(self, torch: Any, arriving: AsyncScalars) -> None:
        """Compare the copies, after a step, with the values that there are now."""
        before, self._before = self._before, []
        pairs: list[tuple[Any, Any]] = [(parameter(), values) for parameter, values in before]
        if not pairs or any(now is None or now.shape != values.shape or now.dtype != values.dtype for now, values in pairs):
            return
        if pairs[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            differ = torch.stack([(now.detach() != values).any() for now, values in pairs]).any()
        arriving.read(differ, self._count)

    def _count(self, values: tuple[float, ...]) -> None:
        if values[0]:
            self.changed += 1
        else:
            self.unchanged += 1


def _is_small(torch: Any, parameter: Any) -> bool:
    """Say whether a parameter is one of torch's own class, dense, that is trained and has few values."""
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor) or not parameter.requires_grad:
        return False
    return 0 < parameter.numel() <= _SMALL and parameter.layout is torch.strided and not parameter.is_meta


class Rates:
    """The learning rates of an optimizer, the largest of its groups at each sampled step."""

    def __init__(self) -> None:
        self._first = self._last = self._steps = 0  # losses of the recording before the first and the last step; steps
        self._highest = self._rate = 0.0
        self._since: dict[float, int | None] = {SMALL: None, NEGLIGIBLE: None}  # losses when it fell below such a share

    def note(self, groups: Sequence[Group], losses: int) -> None:
        """Note the rate of a step."""
        rates = [rate for group in groups if (rate := _number(group.settings.get("lr"))) is not None]
        if not rates:
            return
        self._first = self._first if self._steps else losses
        self._steps += 1
        self._last, self._rate = losses, max(rates)
        self._highest = max(self._highest, self._rate)
        for share, since in self._since.items():
            if self._rate > share * self._highest:
                self._since[share] = None
            elif since is None:
                self._since[share] = losses

    def facts(self) -> RateFacts | None:
        """Return the course; None where no rate was seen."""
        if not self._steps:
            return None
        shares = {share: 0 if since is None else self._last - since + 1 for share, since in self._since.items()}
        batches = self._last - self._first + 1
        return RateFacts(
            highest=self._highest,
            last=self._rate,
            steps=self._steps,
            batches=batches,
            small=shares[SMALL],
            negligible=shares[NEGLIGIBLE],
        )


def _number(rate: Any) -> float | None:
    """Return a rate as a number; None of one that a tensor holds, which to read would wait for its device."""
    return float(rate) if issubclass(type(rate), (int, float)) else None
