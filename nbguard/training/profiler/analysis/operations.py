"""The operation or layer that made a value which is not finite, in words, and the change that keeps it from doing so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nbguard.memory.core.advice import repair_nan

# --- The layer that made a NaN in float16 or bfloat16, and its result in float32 on the same batch.


LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
"""Largest number of the types that mixed precision computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Trial:
    """The result of computing the layer in float32. Where that was not enough, the layers that failed next did so, too."""

    dtype: str  # that the layer had computed in, e.g. "float16"
    layers: tuple[str, ...] = ()  # names of the modules that computed in float32 in the last try; "" is the model
    is_finite: bool = False  # the model's output is finite then
    largest: float | None = None  # magnitude that the first of them returned in float32; None if that is not finite either
    note: str = ""  # the reason why it was not tried; empty if it was
    types: tuple[str, ...] = ()  # of the layers

    @property
    def is_small(self) -> bool:
        """Say whether the layer had computed in a type that is smaller than float32."""
        return self.dtype in LARGEST

    @property
    def is_in_vain(self) -> bool:
        """Say whether the layer was tried in float32, and its output was not finite either."""
        return self.is_small and not self.note and self.largest is None

    @property
    def names(self) -> str:
        """Return the layers in words."""
        types = dict(zip(self.layers, self.types, strict=False))
        return ", ".join(module_words(name, types.get(name, "")) if name else "the model as a whole" for name in self.layers)


def module_words(name: str, type_name: str = "") -> str:
    """Return a module of a model in words: by its name alone, `0` would be a number."""
    return f"the module `{name}`{f' ({type_name})' if type_name else ''}" if name else "the model"


def words_of(trial: Float32Trial) -> str:
    """Return the result in words, or "" where the layer had computed in float32 anyway."""
    if not trial.is_small:
        return ""
    if trial.note:
        return f"it was not tried in float32: {trial.note}"
    if trial.largest is None:
        return f"in float32 it is not finite either, so {trial.dtype} is not the cause"
    limit = LARGEST[trial.dtype]
    beyond = f", more than {trial.dtype} can hold ({limit:g})" if trial.largest > limit else ""
    values = f"in float32 it returns finite values on this batch (up to {trial.largest:.3g}{beyond})"
    if not trial.is_finite:
        return f"{values}, but later layers in {trial.dtype} are still not finite"
    more = f", and with {trial.names} in float32 the model's output is finite" if len(trial.layers) > 1 else ""
    return f"{values}{more}"


def change_of(trial: Float32Trial) -> str:
    """Return the remedy that follows from it; empty where none does."""
    if not trial.is_small or trial.note or trial.is_in_vain:
        return ""
    if trial.is_finite:
        return f"let {trial.names} compute in float32: " + repair_nan().code + " shows the line, or makes a copy"
    return "compute in bfloat16, which has the range of float32 (`dtype=torch.bfloat16`), or scale its inputs down"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOperation:
    """One operation of the user's code, with the numbers that it got where its result is not finite."""

    name: str  # as torch calls it, e.g. "acos"; "div" of `/`
    line: str = ""  # of the user's code, e.g. "In[2], line 19 in margin_loss()"; "": not known
    module: str = ""  # name of the module of the model whose `forward` had called it; "": none, or the model itself
    module_type: str = ""  # its class; "": it was called outside of the model
    is_backward: bool = False  # its result is finite, its gradient is not
    result: Literal["NaN", "infinite"] = "NaN"  # or the gradient
    dtype: str = "float32"  # the narrowest that it computed with
    value: float | None = None  # of its first operand at the first such place; None if the operand has no such place
    other: float | None = None  # of its second operand there
    largest: float | None = None  # finite magnitude among its operands
    is_empty: bool = False  # an operand has no values
    has_only_minus_infinity: bool = False  # a softmax over rows that a mask leaves empty
    is_masked: bool = False  # in the backward pass: the gradient that it got there was 0

    @property
    def words(self) -> str:
        """Return the operation with its operands, and its line."""
        where = f" at {self.line}" if self.line else ""
        module = f" (module `{self.module}`, {self.module_type})" if self.module else ""
        return f"{self._operation}{where}{module}"

    @property
    def _operation(self) -> str:
        name, value, other = self.name, self.value, self.other
        if self.is_backward:
            at = "" if value is None else f" at {_number(value)}"
            if name == "div" and other is not None:
                at = f" at {_number(value)} / {_number(other)}"
            masked = " (`torch.where`, or a product with 0, does not stop it)" if self.is_masked else ""
            return f"the backward pass of `{name}`{at}{masked}{self._precision}"
        if name in _CREATES:
            return f"`{name}`, which inserts a value that is not finite"
        if self.is_empty:
            return f"`{name}` of no values"
        if self.has_only_minus_infinity:
            return f"`{name}` of minus infinity only, because a mask hides a whole row"
        if name == "div" and value is not None and other is not None:
            return f"division of {_number(value)} by {_number(other)}{self._precision}"
        if name == "pow" and value is not None and other is not None:
            return f"`pow` of {_number(value)} to the power {_number(other)}{self._precision}"
        if value is not None and other is not None and name in _OF_TWO:
            return f"`{name}` of {_number(value)} and {_number(other)}{self._precision}"
        if value is not None:
            return f"`{name}` of {_number(value)}{self._precision}"
        up_to = "" if self.largest is None else f" of values up to {self.largest:.3g}"
        return f"`{name}`{up_to}{self._precision}"

    @property
    def _precision(self) -> str:
        return f" in {self.dtype}" if self.dtype in LARGEST else ""

    @property
    def is_singular(self) -> bool:
        """Say whether it has no finite value or gradient for its operands in any type: nothing has to have grown for that."""
        if self.name in _EXPONENTIALS and not self.is_backward:
            return True
        return bool(self._remedy)

    @property
    def change(self) -> str:
        """Return the change to make."""
        remedy = self._remedy
        if remedy:
            return remedy
        if self.dtype in LARGEST:
            return (
                f"let `{self.name}` compute in float32: `with torch.autocast(device_type, enabled=False):` around it and "
                "`.float()` on its operands, or scale these down"
            )
        return self.change_of_values

    @property
    def change_of_values(self) -> str:
        """Return the change to make where computing in float32 does not help either."""
        if self._remedy:
            return self._remedy
        place = f" at {self.line}" if self.line else ""
        return f"check the operands of `{self.name}`{place}, and keep them in the range where its result is finite"

    @property
    def _remedy(self) -> str:
        rule = next((rule for rule in _RULES if (not rule.names or self.name in rule.names) and rule.applies(self)), None)
        if rule is None:
            return ""
        small = "1e-3" if self.dtype in LARGEST else "1e-6"
        tiny = {"float16": "1e-4", "bfloat16": "1e-6"}.get(self.dtype, "1e-12")
        most = 10 if self.dtype == "float16" else 80
        return rule.change.format(name=self.name, small=small, tiny=tiny, most=most)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The change that keeps some operations finite."""

    names: frozenset[str]  # of the operations; empty for any
    change: str  # with `{tiny}`, `{small}` for numbers that the type still tells from 0, and from 1
    applies: Callable[[FailedOperation], bool] = lambda _: True


_CREATES = frozenset(
    ("tensor", "as_tensor", "from_numpy", "full", "full_like", "fill", "masked_fill", "new_full", "setitem", "new_tensor")
)
_EXPONENTIALS = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "poisson_nll_loss"))
_OF_TWO = frozenset(("mul", "add", "sub", "atan2", "hypot", "fmod", "remainder", "xlogy"))


def _of(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _is_at_most_zero(operation: FailedOperation) -> bool:
    return operation.value is None or operation.value <= 0


def _is_backward(operation: FailedOperation) -> bool:
    return operation.is_backward


def _has_far_power(operation: FailedOperation) -> bool:
    value, power = operation.value, operation.other
    return value is not None and power is not None and value < 0 and power != round(power)


_RULES = (
    _Rule(_CREATES, "remove this value, or use a large finite one instead"),
    _Rule(
        frozenset(),
        "remove this value, or use a large finite one instead",
        lambda of: of.other is not None and not math.isfinite(of.other),
    ),
    _Rule(frozenset(), "skip batches with no element selected for `{name}`", lambda of: of.is_empty),
    _Rule(
        frozenset(),
        "leave one entry of each row unmasked, or mask with a large finite number: `masked_fill(mask, -1e4)`",
        lambda of: of.has_only_minus_infinity,
    ),
    _Rule(_of("acos asin atanh erfinv"), "clamp its input: `x.clamp(-1 + {small}, 1 - {small})`"),
    _Rule(
        _EXPONENTIALS,
        "clamp or scale down its input: `x.clamp(max={most})`; for a sum of exponentials `torch.logsumexp`, for their ratio "
        "`softmax`",
    ),
    _Rule(
        _of("sqrt rsqrt"),
        "keep its input above 0, before the root: `x.clamp_min({tiny})`",
        lambda of: of.is_backward or _is_at_most_zero(of),
    ),
    _Rule(
        _of("norm cdist pdist dist pairwise_distance normalize matrix_norm cosine_similarity triplet_margin_loss"),
        "its gradient at 0 is not finite; add a little under the root, `(x.square().sum(-1) + {tiny}).sqrt()`",
        _is_backward,
    ),
    _Rule(
        _of("log log2 log10 xlogy kl_div gaussian_nll_loss"),
        "keep its input above 0: `x.clamp_min({tiny})`; `log_softmax` and `logsigmoid` need no clamp",
        _is_at_most_zero,
    ),
    _Rule(_of("log1p"), "keep its input above -1: `x.clamp_min(-1 + {small})`"),
    _Rule(_of("logit"), "give it an eps: `torch.logit(x, eps={small})`"),
    _Rule(_of("acosh"), "clamp its input: `x.clamp_min(1 + {small})`"),
    _Rule(
        _of("div"),
        "keep the divisor away from 0: `/ d.clamp_min({tiny})`, or `torch.where` on the divisor before",
        lambda of: of.is_backward or of.other is None or abs(of.other) < _NOTHING,
    ),
    _Rule(_of("reciprocal"), "keep its input away from 0: `x.clamp_min({tiny})`", lambda of: not of.value),
    _Rule(_of("pow"), "a negative number has no such power; use ` x.clamp_min(0)`, or `x.abs()`, before it", _has_far_power),
    _Rule(_of("pow"), "keep its base away from 0: `x.clamp_min({tiny})`", lambda of: of.value == 0),
    _Rule(
        _of("std var std_mean var_mean"),
        (
            "the spread of one value is NaN, and the spread of equal values has no gradient; use `correction=0` "
            "and an eps under the root"
        ),
    ),
    _Rule(_of("atan2 hypot"), "both of its operands are 0: add {small} to one of them", _is_backward),
    _Rule(_of("inv det logdet slogdet solve pinv lstsq"), "the matrix is singular; add `{small} * torch.eye(n)` to it"),
    _Rule(
        _of("linalg_svd svd linalg_eigh linalg_eig linalg_qr qr"),
        "its gradient needs distinct values; add a little noise to the matrix, or use no vectors",
        _is_backward,
    ),
    _Rule(
        _of("layer_norm batch_norm group_norm instance_norm rms_norm normalize"),
        "all values are equal there; use an `eps` above 0, e.g. `eps={small}`",
        lambda of: not of.is_backward and (of.largest or 0) < _LARGE,
    ),
    _Rule(
        _of("cross_entropy nll_loss"),
        "all of its targets are ignored (`ignore_index`, weights of 0); skip such batches",
        lambda of: of.result == "NaN" and not of.is_backward,
    ),
    _Rule(_of("lgamma digamma polygamma"), "keep its input away from 0 and the negative integers: `x.clamp_min({small})`"),
    _Rule(_of("empty empty_like new_empty"), "its memory is uninitialised; use `torch.zeros`"),
)
_NOTHING = 1e-30
"""Magnitude of a divisor that is as good as 0."""
_LARGE = 1e4
"""Least magnitude of an operand that makes its statistics overflow by its size."""


def _number(value: float | None) -> str:
    """Return a number with as many digits as tell it from a whole one."""
    if value is None:
        return "?"
    value += 0.0  # -0 is 0
    if not math.isfinite(value):
        return str(value)
    return f"{value:.6g}" if float(f"{value:.6g}") != round(value) or value == round(value) else f"{value:.9g}"
