"""The layer that made a NaN in float16 or bfloat16, and its result in float32 on the same batch."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.memory.core.advice import repair_nan

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
        """Say whether the layer was tried in float32, and what it returned was not finite either."""
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
