"""The result of `%nbguard fix nan`: the layers that have to compute in float32, and the line that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.core.advice import in_float32, repair_nan
from nbguard.render.blocks import Block, Line, Title
from nbguard.render.result import Result
from nbguard.training.profiler.analysis.health.nonfinite import Origin, evidence_of
from nbguard.training.profiler.analysis.health.operations import change_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NanRepair(Result):
    """The layer that made a value which is not finite, and whether float32 cures it."""

    kind: ClassVar[str] = "nan_repair"
    view: ClassVar[str] = "nbguard.training.profiler.analysis.health.nan_repair:nan_repair_blocks"
    label: ClassVar[str] = "Repair of NaN"

    subject: str  # the Learner or model as the notebook writes it; "": it has no name there
    met: str  # the value and its batch in words, e.g. "the loss is NaN in batch 3 of epoch 1"
    origin: Origin  # of the value
    layers: tuple[str, ...] = ()  # names of the layers that have to compute in float32; empty if float32 is no cure
    line: str = ""  # of Python, that makes them; empty without one
    copy: str = ""  # variable of a copy whose layers do; empty if none was asked for


def line_for(subject: str, layers: tuple[str, ...]) -> str:
    """Return the line that makes layers compute in float32."""
    return in_float32(subject, layers).command if subject and layers else ""


def nan_repair_blocks(repair: NanRepair) -> Iterator[Block]:
    """Yield the value, the result in float32, and the line to paste."""
    yield Title(repair.met, "strong")
    yield Line(f"{evidence_of(repair.origin)}.")
    if not repair.layers:
        trial = repair.origin.trial
        remedy = "" if trial is None else change_of(trial)
        yield Line(f"float32 does not help here, so there is no copy to make. {remedy[:1].upper()}{remedy[1:]}".rstrip(), "dim")
    elif repair.copy:
        owner = f"{repair.subject} " if repair.subject else "the model "
        yield Line(
            f"`{repair.copy}` is a copy of the model whose layers named above compute in float32. It shares its parameters "
            "with "
            f"{owner}and the optimizer, and has no hooks. Train it instead of the model, which is unchanged."
        )
    else:
        if repair.line:
            yield Line(f"This line makes them compute in float32 until `float32.undo()`: `{repair.line}`")
        yield Line("To leave the model as it is, make a copy: " + repair_nan(repair.subject, "-o finite").code, "dim")
