"""Values that are NaN or infinite: their first origin, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nbguard.profiler.analysis.report import FitFinding

Kind = Literal["input", "layer", "code", "loss", "step", "gradient", "unknown"]
"""The maker of the first value that is not finite. `input`: it came with the batch. `layer`: one module. `code`: lines of a
module's own `forward`, or between modules. `loss`: the loss function. `step`: the optimizer step before: a parameter is not
finite. `gradient`: the backward pass."""


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """A batch in the fit, by its numbers from 1."""

    batch: int  # of the epoch; without a loader: backward passes
    epoch: int = 0  # 0: there is no loader

    @property
    def words(self) -> str:
        """Return it in words."""
        return f"batch {self.batch} of epoch {self.epoch}" if self.epoch else f"backward pass {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of the first value that is not finite."""

    kind: Kind  # the kind of code that made it
    name: str = ""  # of the module or parameter in the model; "": not known
    type: str = ""  # of the module, e.g. "Linear", or "parameter"
    root: str = ""  # type of the model
    note: str = ""  # the reason why an "unknown" one is not known

    @property
    def layer(self) -> str:
        """Return the module or parameter in words."""
        if not self.name:
            return f"`{self.root or self.type}`"
        return f"`{self.name}`" + (f" ({self.type})" if self.type else "") + (f" of `{self.root}`" if self.root else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """The first value that was not finite: of a loss, or of a gradient."""

    of: Literal["loss", "gradient"]  # kind of value
    value: Literal["NaN", "infinite"]  # NaN, or an infinity
    place: BatchPosition  # the batch
    origin: Origin  # the code that made it
    has_stopped: bool = False  # `--stop-on-nan` ended the fit there
    is_search: bool = False  # met by fastai's learning rate finder, which goes so far on purpose


@dataclass(frozen=True, slots=True)
class FiniteFacts:
    """The values that were checked, and the first one that was NaN or infinite."""

    losses: int = 0  # losses that were checked
    gradients: int = 0  # optimizer steps before which all gradients were checked
    first: NotFinite | None = None  # None: all were finite


def nan_findings(facts: FiniteFacts, scale: float | None = None) -> tuple[FitFinding, ...]:
    """Return the first NaN or infinity, if there was any. `scale`: the first one of a GradScaler; None without one."""
    first = facts.first
    if first is None:
        return ()
    what = f"the {first.of} is {first.value} in {first.place.words}"
    if first.is_search:
        goes_on = "the learning rate finder raises the rate until the loss diverges"
        return (
            FitFinding(
                kind="nan", severity="note", what=what, evidence=goes_on, change="nothing: take a rate from well before that"
            ),
        )
    if first.has_stopped:
        what += "; the fit was stopped there"
    if first.of == "loss" and first.value == "infinite" and first.origin.kind == "loss" and scale is not None:
        evidence = f"{evidence_of(first.origin)}, or its product with the scale"
        change = f"look at the loss itself: it is seen times the GradScaler's scale ({scale:g} at first), which may overflow"
        return (
            FitFinding(kind="nan", severity="problem", what=f"the scaled loss{what[8:]}", evidence=evidence, change=change),
        )
    return (FitFinding(kind="nan", severity="problem", what=what, evidence=evidence_of(first.origin), change=_change(first)),)


def evidence_of(origin: Origin) -> str:
    """Return in words where it came from."""
    layer = origin.layer
    return {
        "input": f"the batch itself has values that are not finite: the input of {layer}",
        "layer": f"first in {layer}: what it was given was finite, what it returned was not",
        "code": f"first in the code of `forward` around {layer}: what other layers had returned was finite",
        "loss": f"the output of {layer} is finite for this batch: what makes the loss of it is to blame",
        "step": f"{layer} is not finite any more: the optimizer step before has broken it, and what comes before it with it",
        "gradient": f"the loss was finite, the gradient of {layer} is not: its backward pass, or what follows it, made that",
        "unknown": f"where it came from was not found: {origin.note}",
    }[origin.kind]


def _change(first: NotFinite) -> str:
    clip = "`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` before the step (fastai: `cbs=GradientClip`)"
    origin = first.origin
    remedy = {
        "input": "look for such samples: `torch.isfinite(x).all()` over the dataset; fill or drop them",
        "layer": f"look at what {origin.layer} gets, and keep it in the range of its dtype and away from what it cannot take",
        "code": "keep divisors, logarithms and roots there away from 0: `.clamp_min(1e-6)`",
        "loss": "take a loss that works on logits (`nn.CrossEntropyLoss`, `nn.BCEWithLogitsLoss`), or `.clamp_min(1e-6)` "
        "before a logarithm",
        "step": f"a lower learning rate, or {clip}",
        "gradient": "look at its backward pass (roots, norms and divisions at 0): clipping cannot mend a NaN"
        if first.value == "NaN"
        else f"look at its backward pass (roots, norms and divisions at 0), or {clip}",
        "unknown": "`%%profile_fit --stop-on-nan` looks before each backward pass and stops there",
    }[origin.kind]
    return remedy if first.has_stopped or origin.kind in ("input", "unknown") else f"{remedy}; `--stop-on-nan` stops there"
