"""Facts of optimizers, torch's and fastai's, by parameter group, and signs that their steps train something."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

from nbguard.libraries import single_optimizers
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.checks.check import AsyncScalars
from nbguard.units import HALF_ROUNDS_TO_ZERO, MiB, counted, format_bytes

# --- Facts of optimizers


_ENOUGH = 3
_SHOWN = 3
_MANY = 8
"""Optimizers that are more than models and their parts want."""
_MANY_PASSES = 32
"""Backward passes without a step that are more than a loop adds gradients up over, as a rule."""
_MUCH = 0.1
"""Share of gradients that is mentioned if nobody uses it."""

SMALL, NEGLIGIBLE = 1e-4, 1e-6
"""Shares of the highest learning rate below which hardly anything, and nothing at all, is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFacts:
    """The learning rate of an optimizer at the sampled steps, the largest of its groups."""

    highest: float
    last: float
    steps: int  # that were sampled
    batches: int  # training batches from the first to the last of them
    small: int  # of these, the last ones with it below `SMALL` of the highest
    negligible: int  # likewise, below `NEGLIGIBLE`


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer, as its steps and the calls that clear gradients showed it in the sampled batches."""

    name: str  # of its class
    steps: int = 0  # in the sampled batches
    cleared: int = 0  # calls of `zero_grad`, or of a model's
    cleared_in_place: int = 0  # of these, with `set_to_none=False`
    gradient_bytes: int = 0  # at the last sample before a step
    half_eps: tuple[tuple[float, int], ...] = ()  # eps of groups that are not fused, with their float16 parameters
    piled: int = 0  # looks at which gradients of the step before were still there when the next backward pass began
    replaced: int = 0  # looks at which they were not
    thrown: int = 0  # calls that cleared the gradients of a backward pass before any step
    parameters: int = 0  # tensors that it steps
    without_gradients: tuple[str, ...] = ()  # parameters that never had one at any look
    looks: int = 0  # at its parameters, before steps 1, 2, 4, 8, …
    is_learners: bool = field(default=False, metadata={"json": "is_fastai"})  # a Learner's own, not a wrapper of one of torch
    fusible: str = ""  # torch's class that does the same with `fused=True`; "": none is known, or it is fused
    is_wrapped: bool = False  # torch's, in fastai's `OptimWrapper`
    is_looped: bool = False  # it was told to go through its parameters one by one: `foreach=False`
    is_stateless: bool = False  # it keeps nothing from step to step: SGD without momentum
    is_renewed: bool = False  # it steps the parameters of an earlier one
    foreign: int = 0  # parameters that never had a gradient at any look, and that no model has that was called
    left: int = 0  # parameters that a model had once, and none has that was called lately; they have no gradient any more
    trainable: int = 0  # parameters that require a gradient
    emptied: int = 0  # steps between which and the backward pass gradients were cleared
    changed: int = 0  # looks at which a value had changed by a step; of one that never steps: between two calls of `zero_grad`
    unchanged: int = 0  # looks at which none had, of those that were compared
    rate: RateFacts | None = None  # learning rate; None if unknown


@dataclass(frozen=True, slots=True)
class UnusedGradients:
    """Gradients that are computed and that no optimizer uses."""

    parameters: tuple[str, ...]  # names in the model
    share: float  # of all values with gradients, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizersFacts:
    """All optimizers of a recording."""

    optimizers: tuple[OptimizerFacts, ...] = ()
    backwards: int = 0  # backward passes in the sampled batches
    clears_model: bool = False  # a model's own `zero_grad` was called: whose gradients went is then not known
    unused: UnusedGradients | None = None  # None without any, and where the loop updates them itself
    untaught: tuple[str, ...] = ()  # parameters of models that were called, with gradients, that no optimizer has
    schedulers: tuple[
        tuple[str, int], ...
    ] = ()  # classes of torch's schedulers of the learning rate, and calls of their `step`
    losses: int = 0  # in all batches
    untouched: int = 0  # backward passes up to the last comparison; 0 if a value had changed, or an optimizer stepped
    gradients: int = 0  # calls of `torch.autograd.grad` in the sampled batches
    stepped_by: str = ""  # module of a library that steps an optimizer for each parameter; "": none of those that are known


def faster_step(facts: OptimizersFacts) -> str:
    """Return a way to have the step of the optimizer with the most parameters take fewer calls; empty where none is known."""
    facts_of_most = max(facts.optimizers, key=lambda optimizer: optimizer.parameters, default=None)
    if facts_of_most is None or not (facts_of_most.fusible or facts_of_most.is_looped):
        return ""
    name = facts_of_most.fusible or facts_of_most.name
    if facts_of_most.is_learners or facts_of_most.is_wrapped:
        line = f"opt_func=partial(OptimWrapper, opt=torch.optim.{name}, fused=True)"
    else:
        line = f"{name}(…, fused=True)"
    if not facts_of_most.fusible:
        line = line.replace("fused=True", "foreach=True")
    return f"`{line}` takes fewer calls for a step"


def optimizer_findings(
    facts: OptimizersFacts, *, is_scaled: bool = False, times: Mapping[str, int] | None = None
) -> tuple[FitFinding, ...]:
    """Return the findings.

    `is_scaled`: a GradScaler decides which steps are taken. `times`: nanoseconds of a batch by phase, as far as they are known.
    """
    times = times or {}
    findings: list[FitFinding] = [*_many(facts, times), *_renewed(facts), *_unused(facts, times), *_by_gradients(facts)]
    for optimizer in facts.optimizers:
        findings += [*_eps(optimizer), *_piles_up(optimizer, facts), *_in_place(optimizer), *_without_gradients(optimizer)]
        if not is_scaled:
            findings += [*_never_steps(optimizer, facts), *_thrown(optimizer, facts)]
    if not is_scaled and not any(finding.kind == "step" for finding in findings):
        findings += _untouched(facts)
    return tuple(findings)


def _eps(facts: OptimizerFacts) -> Iterator[FitFinding]:
    bad = [(eps, count) for eps, count in facts.half_eps if 0 < eps <= HALF_ROUNDS_TO_ZERO]
    if bad:
        eps, count = bad[0][0], sum(count for _, count in bad)
        eps_of = "`opt_func=partial(Adam, eps=1e-5)`" if facts.is_learners else f"`{facts.name}(…, eps=1e-5)`"
        yield FitFinding(
            kind="eps",
            severity="problem",
            what=f"eps={eps:g} of {_name(facts)} is 0 in float16",
            evidence=f"{counted(count, 'float16 parameter')}: where the moments are 0 too, the step divides 0 by 0 "
            "and gives NaN",
            change=f"{eps_of}, or keep the parameters in float32 and use `torch.autocast`",
        )


def _piles_up(facts: OptimizerFacts, all_facts: OptimizersFacts) -> Iterator[FitFinding]:
    is_cleared = 2 * facts.cleared > facts.steps or all_facts.clears_model or facts.replaced >= facts.piled
    if facts.steps >= _ENOUGH and facts.piled >= 2 and not is_cleared:
        clears = "nothing clears them" if not facts.cleared else f"`zero_grad` clears them only {facts.cleared} times"
        yield FitFinding(
            kind="zero_grad",
            severity="problem",
            what=f"gradients pile up: {facts.name} steps, and {clears}",
            evidence=f"{facts.steps} steps and {facts.cleared} calls of `zero_grad` seen: "
            "each step uses all the gradients added up so far",
            change="`optimizer.zero_grad()` before each backward pass",
            nbytes=facts.gradient_bytes,
        )


def _thrown(facts: OptimizerFacts, all_facts: OptimizersFacts) -> Iterator[FitFinding]:
    if facts.steps >= _ENOUGH and facts.thrown >= 2 * facts.steps and len(all_facts.optimizers) == 1:
        yield FitFinding(
            kind="zero_grad",
            severity="problem",
            what=f"`zero_grad` throws gradients away: {_name(facts)} uses only the last of several backward passes",
            evidence=f"gradients cleared {facts.cleared} times for {facts.steps} steps, {facts.thrown} times after a "
            "backward pass that no step had used",
            change="`optimizer.zero_grad()` after each step, and not before each backward pass",
        )


def _many(facts: OptimizersFacts, times: Mapping[str, int]) -> Iterator[FitFinding]:
    """Yield many optimizers that step one after the other, each with few parameters."""
    stepped = [optimizer for optimizer in facts.optimizers if optimizer.steps]
    count = round(sum(optimizer.steps for optimizer in stepped) / max(facts.backwards, 1))
    if min(count, len(stepped)) >= _MANY and not any(optimizer.is_renewed for optimizer in stepped):
        time = times.get(phase_log.STEP, 0) + times.get(phase_log.ZERO_GRAD, 0)
        yield FitFinding(
            kind="optimizers",
            severity="advice",
            what=f"{count} optimizers step in each batch",
            evidence=f"with {sum(optimizer.parameters for optimizer in stepped)} parameters in all: one optimizer "
            "updates many parameters at once",
            change=single_optimizers().get(facts.stepped_by)
            or f"one `{facts.optimizers[0].name}(model.parameters())`, with groups where settings differ",
            time=time * (count - 1) // count or None,
        )


def _renewed(facts: OptimizersFacts) -> Iterator[FitFinding]:
    """Yield an optimizer that is made again in each batch, or nearly, so that its memory of the steps before is lost."""
    names = {optimizer.name for optimizer in facts.optimizers if optimizer.is_renewed}
    for name in sorted(names):
        alike = [optimizer for optimizer in facts.optimizers if optimizer.name == name and optimizer.steps]
        if len(alike) < _ENOUGH or any(optimizer.steps > 1 for optimizer in alike[1:]):
            continue
        of = "fastai's " if alike[0].is_learners else ""
        forgets = not all(optimizer.is_stateless for optimizer in alike)
        yield FitFinding(
            kind="renewed",
            severity="problem" if forgets else "note",
            what=f"a new {of}{name} is made in each batch"
            + (", and its state (momentum, averages) is lost each time" if forgets else ""),
            evidence=f"{len(alike)} of them took one step each, on the same parameters",
            change=f"make `{name}` once, before the loop",
        )


def _unused(facts: OptimizersFacts, times: Mapping[str, int]) -> Iterator[FitFinding]:
    """Yield gradients that are computed for nothing."""
    unused = facts.unused
    if unused is not None and unused.share >= _MUCH:
        names = unused.parameters
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield FitFinding(
            kind="unused gradients",
            severity="advice",
            what=f"{counted(len(names), 'parameter')} {'gets' if len(names) == 1 else 'get'} gradients that no optimizer uses: "
            f"{shown}{more}",
            evidence=f"{unused.share:.0%} of all values with gradients",
            change=f"`requires_grad_(False)` for frozen parts, e.g. `model.{names[0].partition('.')[0]}`; parts that "
            "should learn belong in the optimizer",
            time=round(times.get(phase_log.BACKWARD, 0) * unused.share / 2) or None,
        )


def _in_place(facts: OptimizerFacts) -> Iterator[FitFinding]:
    if facts.cleared_in_place and facts.gradient_bytes:
        held = format_bytes(facts.gradient_bytes)
        yield FitFinding(
            kind="zero_grad",
            severity="advice" if facts.gradient_bytes >= MiB else "note",
            what="`zero_grad(set_to_none=False)` keeps the gradients' memory",
            evidence=f"{held} of gradients stay allocated through the next forward pass, filled with zeros "
            f"({counted(facts.cleared_in_place, 'call')} seen)",
            change="`optimizer.zero_grad()`: it sets them to None",
            nbytes=facts.gradient_bytes,
        )


def _never_steps(facts: OptimizerFacts, all_facts: OptimizersFacts) -> Iterator[FitFinding]:
    is_unchanged = facts.unchanged and not facts.changed  # else it is updated by hand, or that is unknown
    if not facts.steps and is_unchanged and min(facts.cleared, all_facts.backwards) >= _ENOUGH:
        yield FitFinding(
            kind="step",
            severity="problem",
            what=f"{facts.name} never steps",
            evidence=f"{all_facts.backwards} backward passes and {facts.cleared} calls of `zero_grad`, but no `step()`",
            change="`optimizer.step()` after the backward pass",
        )


def _untouched(facts: OptimizersFacts) -> Iterator[FitFinding]:
    """Yield backward passes that nothing follows, also where their optimizer is not known."""
    if facts.untouched >= _MANY_PASSES:
        yield FitFinding(
            kind="step",
            severity="problem",
            what="no optimizer steps after the backward passes, and no parameter changes",
            evidence=f"before backward pass {facts.untouched} the values that were compared were the same as before the first",
            change="`optimizer.step()` after each backward pass, unless you only want the gradients",
        )


def _by_gradients(facts: OptimizersFacts) -> Iterator[FitFinding]:
    """Yield gradients that no backward pass has computed."""
    if facts.gradients and not facts.losses:
        yield FitFinding(
            kind="autograd.grad",
            severity="note",
            what="no backward pass and no optimizer step ran on this thread, only `torch.autograd.grad`",
            evidence=f"{counted(facts.gradients, 'call')} in the sampled batches",
            change="a loop that trains in this way is timed by batch if it calls `loss.backward()` instead and uses `p.grad`",
        )


def _without_gradients(facts: OptimizerFacts) -> Iterator[FitFinding]:
    names = facts.without_gradients
    if names and facts.looks >= 2 and len(names) < facts.trainable:  # else nothing is trained
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield FitFinding(
            kind="unused",
            severity="note",
            what=f"{counted(len(names), 'parameter')} of {_name(facts)} never got a gradient",
            evidence=f"{shown}{more}: {'it requires' if len(names) == 1 else 'they require'} one, but the loss does "
            "not depend on "
            f"{'it' if len(names) == 1 else 'them'}",
            change="use the layer, or `requires_grad_(False)` and leave it out of the optimizer",
        )


def _name(facts: OptimizerFacts) -> str:
    return "fastai's optimizer" if facts.is_learners else facts.name


# --- parameter groups


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
"""Values of a parameter that are compared, spread over all that it has."""
_FEW = 8
"""Parameters that are compared, spread over all of one device;"""
_LOOKS = 6
"""and looks at them without any change. None follows the first change."""


@dataclass(slots=True)
class _Kept:
    """A copy of a parameter's values, or of each `stride`-th of them."""

    parameter: weakref.ref[Any]
    stride: int
    values: Any


class Values:
    """Compares a few values of parameters before and after steps, or over several batches where no optimizer steps on them.

    Between the two it holds copies of them.
    """

    def __init__(self, *, looks: int = _LOOKS) -> None:
        """Compare at most `looks` times while nothing changes."""
        self.changed = self.unchanged = 0
        self.last = 0  # the `at` of the last look without any change
        self._looks = looks
        self._before: list[_Kept] = []
        self._versions: list[tuple[weakref.ref[Any], int]] = []  # where no optimizer steps

    @property
    def is_wanted(self) -> bool:
        """Say whether it is still open if anything changes."""
        return not self.changed and self.unchanged < self._looks

    def keep_stepless(self, torch: Any, parameters: Sequence[Any]) -> None:
        """Copy values where no optimizer steps: of large parameters, too. Any parameter that was written to is a change."""
        self._keep(torch, [p for p in parameters if _is_comparable(torch, p)] if self.is_wanted else [])
        plain = [p for p in parameters if type(p) in (torch.nn.Parameter, torch.Tensor)] if self.is_wanted else []
        self._versions = [(weakref.ref(p), p._version) for p in plain]

    def keep(self, torch: Any, parameters: Sequence[Any]) -> None:
        """Copy values of small parameters, before a step."""
        small = [p for p in parameters if _is_comparable(torch, p) and p.numel() <= _SMALL] if self.is_wanted else []
        self._keep(torch, small)

    def _keep(self, torch: Any, parameters: Sequence[Any]) -> None:
        self._before, self._versions = [], []
        if not parameters or _is_capturing(torch, parameters[0]):
            return
        alike = [p for p in parameters if p.device == parameters[0].device]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for p in alike[:: -(-len(alike) // _FEW)]:
                stride = -(-p.numel() // _SMALL)
                self._before.append(_Kept(weakref.ref(p), stride, _part(p, stride).clone()))

    def compare(self, torch: Any, arriving: AsyncScalars, at: int = 0) -> None:
        """Compare the copies, after a step, with the values that there are now. `at` is a number for this moment.

        A large parameter counts as unchanged only where one of the compared values has a gradient, because a step on a few
        rows may leave all of them as they are.
        """
        before, self._before = self._before, []
        versions, self._versions = self._versions, []
        if any((parameter := kept()) is not None and parameter._version != version for kept, version in versions):
            self.changed += 1
            return
        pairs: list[tuple[Any, _Kept]] = [(kept.parameter(), kept) for kept in before]
        if not pairs or any(now is None or not _is_like(now, kept) for now, kept in pairs):
            return
        if _is_capturing(torch, pairs[0][0]):
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            differ = [(_part(now, kept.stride) != kept.values).any() for now, kept in pairs]
            told = [_has_gradient(torch, now, kept) for now, kept in pairs]
            read = torch.stack([torch.stack(differ).any(), torch.stack(told).any()])
        arriving.read(read, partial(self._count, at))

    def _count(self, at: int, values: tuple[float, ...]) -> None:
        is_changed, is_told = values
        if is_changed:
            self.changed += 1
        elif is_told:
            self.unchanged += 1
            self.last = at


def _part(tensor: Any, stride: int) -> Any:
    """Return each `stride`-th value of a tensor without a copy; a large tensor is contiguous."""
    return tensor.detach() if stride == 1 else tensor.detach().view(-1)[::stride]


def _is_like(now: Any, kept: _Kept) -> bool:
    """Say whether a parameter can still be compared with its copy."""
    if kept.stride == 1:
        is_like = now.shape == kept.values.shape
    else:
        is_like = now.is_contiguous() and -(-now.numel() // kept.stride) == kept.values.numel()
    return bool(is_like and now.dtype == kept.values.dtype)


def _has_gradient(torch: Any, parameter: Any, kept: _Kept) -> Any:
    """Return a tensor on the parameter's device that is True where one of the values that were kept should change by a step."""
    gradient = parameter.grad
    if kept.stride == 1:
        return torch.ones((), dtype=torch.bool, device=parameter.device)
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_contiguous():
        return torch.zeros((), dtype=torch.bool, device=parameter.device)
    return (_part(gradient, kept.stride) != 0).any()


def _is_capturing(torch: Any, parameter: Any) -> bool:
    return bool(parameter.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_comparable(torch: Any, parameter: Any) -> bool:
    """Say whether a parameter's values can be compared: it is trained, dense, of torch's own class, and contiguous if large."""
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor) or not parameter.requires_grad:
        return False
    if parameter.numel() == 0 or parameter.layout is not torch.strided or parameter.is_meta:
        return False
    return bool(parameter.numel() <= _SMALL or parameter.is_contiguous())


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
