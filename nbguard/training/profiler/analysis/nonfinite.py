"""Values that are NaN or infinite, with their first origin, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.libraries import in_own_words
from nbguard.memory.core.advice import STOP_ON_NAN, in_float32, repair_nan
from nbguard.render.html import Block, Line, Title
from nbguard.render.result import Result
from nbguard.texts import STOP_OPTION
from nbguard.training.profiler.analysis.operations import FailedOperation, Float32Trial, change_of, words_of
from nbguard.training.profiler.analysis.report import FitFinding

Kind = Literal["input", "target", "layer", "code", "loss", "step", "weights", "gradient", "unknown"]
"""The maker of the first value that is not finite. `input`, `target`: it came with the batch. `layer`: one module. `code`:
lines of a module's own `forward`, or between modules. `loss`: the loss function. `step`: the optimizer step before: a parameter
is not finite. `weights`: a parameter was not finite before the first step. `gradient`: the backward pass."""


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """A batch in the fit, by its numbers from 1."""

    batch: int  # of the epoch; without a loader: backward passes
    epoch: int = 0  # 0 if there is no loader

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
    items: tuple[int, ...] = ()  # of an "input": the first places in the batch, from 0, that are not finite
    trial: Float32Trial | None = None  # None except for a "layer" or "code"
    operation: FailedOperation | None = None  # that made it; None if unknown

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
    is_compiled: bool = False  # something was compiled, so operations outside of models were not recorded
    is_search: bool = False  # met by a Learner's learning rate finder, which goes so far on purpose
    first_loss: float | None = None  # of the fit; None if unknown, as for all of the following
    last_loss: float | None = None  # the last one that was finite
    largest: float | None = None  # finite magnitude of a parameter
    rate: float | None = None  # largest learning rate
    peak: float | None = None  # largest magnitude in the batch's inputs
    usual_peak: float | None = None  # the same of the first batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossJump:
    """The first loss that is many times those before it."""

    place: BatchPosition  # the batch
    loss: float  # of that batch
    usual: float  # largest magnitude of those before it
    peak: float | None = None  # largest magnitude in the batch's inputs; None if unknown
    usual_peak: float | None = None  # the same of the first batch

    @property
    def is_by_data(self) -> bool:
        """Say whether the batch's own data are out of range."""
        return _is_far(self.peak, self.usual_peak)


_FAR = 1e3
"""Times the first batch's largest value that data are which are out of range."""
_EXPLODED = 1e3
"""Magnitude of a parameter, or times the first loss, that tells of too long steps."""
_DIVERGED = 100
"""Times the first loss, and at least this, that the last ones are of a fit that diverges."""
_NEAR = 3
"""Batches after a jump that explain a loss that is not finite by it."""


def _is_far(peak: float | None, usual: float | None) -> bool:
    return peak is not None and usual is not None and peak > _FAR * max(usual, 1e-3)


@dataclass(frozen=True, slots=True)
class LossGrowth:
    """The loss at both ends of a fit."""

    first: float  # loss
    last: float  # median of the latest losses
    rate: float | None = None  # largest learning rate; None if unknown


@dataclass(frozen=True, slots=True)
class LossCourse:
    """The course of the losses that were finite, and of the steps that a GradScaler skipped for their gradients."""

    jump: LossJump | None = None  # None if no loss jumped
    growth: LossGrowth | None = None  # None if unknown
    scaled: Origin | None = None  # of gradients that made a GradScaler skip step after step; None without one or if unknown


@dataclass(frozen=True, slots=True)
class FiniteFacts:
    """The values that were checked, and the first one that was NaN or infinite."""

    losses: int = 0  # losses that were checked
    gradients: int = 0  # optimizer steps with all gradients checked before
    first: NotFinite | None = None  # None if all were finite
    course: LossCourse = LossCourse()  # of the losses


def nan_findings(facts: FiniteFacts, scale: float | None = None, *, in_float16: bool = False) -> tuple[FitFinding, ...]:
    """Return the first NaN or infinity, if there was any.

    Args:
        facts: the observations.
        scale: the first one of a GradScaler; None without one.
        in_float16: whether autocast computed batches in it.
    """
    first = facts.first
    data = tuple(_bad_data(facts))
    if first is None or data:
        return data or tuple(_divergence(facts.course.growth))
    what, operation = what_of(first), first.origin.operation
    if first.is_search:
        goes_on = "the learning rate finder raises the rate until the loss diverges"
        return (
            FitFinding(kind="nan", severity="note", what=what, evidence=goes_on, change="take a rate from well before that"),
        )
    if first.has_stopped:
        what += "; the fit was stopped there"
    is_of_loss = first.of == "loss" and first.value == "infinite" and first.origin.kind == "loss"
    is_scaling = operation is None or (operation.name, operation.dtype) == ("mul", "float32")
    if is_of_loss and scale is not None and is_scaling:
        evidence = f"{evidence_of(first.origin)}, or its product with the scale"
        change = f"look at the loss itself: it is seen times the GradScaler's scale ({scale:g} at first), which may overflow"
        return (FitFinding(kind="nan", severity="problem", what=f"the scaled {what[4:]}", evidence=evidence, change=change),)
    is_singular = operation is not None and operation.is_singular
    if _has_exploded(first) and not is_singular:
        return (_too_long_steps(first, what),)
    if first.of == "gradient" and in_float16 and scale is None and not is_singular:
        evidence, change = f"{evidence_of(first.origin)}; float16 ends at 65504", _SAFE_IN_FLOAT16
        return (FitFinding(kind="nan", severity="problem", what=f"{what}, in float16", evidence=evidence, change=change),)
    evidence = "; ".join((*(_grown(first) if _has_exploded(first) else ()), evidence_of(first.origin)))
    return (FitFinding(kind="nan", severity="problem", what=what, evidence=evidence, change=_change(first)),)


def what_of(first: NotFinite) -> str:
    """Return the value in words, with its batch and the operation that made it."""
    origin = first.origin
    made_by = "" if origin.operation is None else f", made by {origin.operation.words}"
    if origin.kind == "weights":
        made_by = f": `{origin.name}` was not finite before the first step"
    return f"the {first.of} is {first.value} in {first.place.words}{made_by}"


def _bad_data(facts: FiniteFacts) -> Iterator[FitFinding]:
    """Yield a batch whose data are finite and out of range, if it made the loss jump, or not finite."""
    first, jump = facts.first, facts.course.jump
    if first is not None and (first.is_search or first.origin.kind in ("input", "target")):
        return
    what = ""
    if jump is not None and jump.is_by_data and (first is None or _follows(first.place, jump.place)):
        place, peak, usual = jump.place, jump.peak, jump.usual_peak
        what = f"the data of {place.words} are out of range (up to {peak:.3g}, {usual:.3g} in the first batch)"
        what += (
            f": the loss there is {jump.loss:.3g}" if first is None else f": the loss is {first.value} in {first.place.words}"
        )
        evidence = f"the loss there is {jump.loss:.3g}, and at most {jump.usual:.3g} in the batches before"
    elif first is not None and first.of == "loss" and _is_far(first.peak, first.usual_peak):
        place = first.place
        what = f"the data of {place.words} are out of range (up to {first.peak:.3g}, {first.usual_peak:.3g} in the first batch)"
        what += f": the loss is {first.value}"
        evidence = evidence_of(first.origin)
    if what:
        stops = "; the fit was stopped there" if first is not None and first.has_stopped else ""
        change = "look for such samples: `x.abs().max()` over the dataset; clip, normalise or drop them"
        yield FitFinding(kind="data", severity="problem", what=what + stops, evidence=evidence, change=change)


def _divergence(growth: LossGrowth | None) -> Iterator[FitFinding]:
    """Yield a loss that has grown without bounds, and is finite all the same."""
    if growth is not None and abs(growth.last) > _DIVERGED * max(abs(growth.first), 1.0):
        rate = "" if growth.rate is None else f" (it is {growth.rate:g})"
        yield FitFinding(
            kind="divergence",
            severity="problem",
            what=f"the loss grows: {growth.first:.3g} at first, {growth.last:.3g} in the last batches",
            evidence=f"more than {_DIVERGED:g} times the first: the steps are too long",
            change=f"a lower learning rate{rate}, or {_clip()}",
        )


def _follows(place: BatchPosition, before: BatchPosition) -> bool:
    return place.epoch == before.epoch and 0 <= place.batch - before.batch <= _NEAR


def _has_exploded(first: NotFinite) -> bool:
    """Say whether parameters or losses had grown without bounds before: no layer is to blame for that."""
    if first.origin.kind in ("input", "target", "weights") or first.rate is None:
        return False
    has_grown = first.last_loss is not None and abs(first.last_loss) > _EXPLODED * max(abs(first.first_loss or 0), 1.0)
    return has_grown or (first.largest or 0) > _EXPLODED


def _grown(first: NotFinite) -> list[str]:
    """Return in words how losses and parameters had grown before."""
    grown = []
    if first.last_loss is not None:
        grown.append(f"the loss before it was {first.last_loss:.3g}, the first {first.first_loss:.3g}")
    if first.largest:  # 0 if all that are not 0 are not finite
        grown.append(f"parameters are up to {first.largest:.3g}")
    if first.rate is not None:
        grown.append(f"the learning rate is {first.rate:g}")
    return grown


def _too_long_steps(first: NotFinite, what: str) -> FitFinding:
    change = f"a lower learning rate (it is {first.rate:g}), or {_clip()}"
    return FitFinding(
        kind="nan",
        severity="problem",
        what=f"{what}: the steps before it were too long",
        evidence="; ".join((*_grown(first), evidence_of(first.origin))),
        change=change if first.has_stopped else change + "; " + STOP_OPTION + " stops there",
    )


def _places(items: tuple[int, ...]) -> str:
    """Return the places in a batch in words."""
    numbers = ", ".join(map(str, items))
    return f" ({'item' if len(items) == 1 else 'items'} {numbers} of the batch, counted from 0)" if items else ""


def evidence_of(origin: Origin) -> str:
    """Return in words its origin, and the result in float32."""
    layer = origin.layer
    trial = "" if origin.trial is None else words_of(origin.trial)
    where = {
        "input": f"the batch itself has values that are not finite: the input of {layer}{_places(origin.items)}",
        "target": f"the batch itself has values that are not finite: `{origin.name}`{_places(origin.items)}, made by no model",
        "layer": f"first in {layer}; its input was finite, its output was not",
        "code": f"first in the code of `forward` around {layer}; the outputs of the other layers were finite",
        "loss": f"the output of {layer} is finite for this batch, so the loss function is the cause",
        "step": f"the previous optimizer step made {layer} non-finite, and maybe other parameters",
        "weights": f"{layer} was not finite from the start, as a checkpoint or an earlier fit left it",
        "gradient": (
            f"the loss was finite, but the gradient of {layer} is not, so its backward pass or a later layer's is the cause"
        ),
        "unknown": f"the cause was not found: {origin.note}",
    }[origin.kind]
    return f"{where}; {trial}" if trial else where


_SAFE_IN_FLOAT16 = (
    "`dtype=torch.bfloat16`, which has the range of float32; or a `torch.amp.GradScaler()`, which leaves out the steps of such "
    "gradients and lowers its scale"
)


def _clip() -> str:
    return f"`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` before the step{in_own_words('clip')}"


def _change(first: NotFinite) -> str:
    trial = first.origin.trial
    operation = first.origin.operation
    remedy = "" if trial is None else change_of(trial)
    if not remedy and operation is not None:
        return operation.change if trial is None or not trial.is_in_vain else operation.change_of_values
    remedy = remedy or _usual_change(first)
    is_known = first.has_stopped or first.origin.kind in ("input", "target", "weights", "unknown")
    if is_known:
        return remedy
    if first.is_compiled:
        return remedy + "; a fit without `torch.compile` names the operation, and " + STOP_OPTION + " stops there"
    if operation is not None:
        return remedy + "; " + STOP_OPTION + " stops there"
    return remedy + "; " + STOP_ON_NAN.code + " records each step, mostly names the operation, and stops there"


def _usual_change(first: NotFinite) -> str:
    origin = first.origin
    clipping = "clipping cannot repair a NaN" if first.value == "NaN" else "`clip_grad_norm_` makes a NaN of an infinity"
    return {
        "input": f"its data are not finite{_places(origin.items)}: look for such samples, `torch.isfinite(x).all()` over the "
        "dataset; fill or drop them",
        "target": f"`{origin.name}` is not finite{_places(origin.items)}: look for such samples, `torch.isfinite(y).all()` "
        "over the dataset; fill or drop them",
        "layer": f"check the input of {origin.layer}; keep it in the range of its dtype and away from invalid values",
        "code": f"check that code's values in {first.place.words}",
        "loss": "check how the loss is computed from the model's output, and callbacks that change the output",
        "step": "check the gradients of the previous batch; if they were finite, the learning rate made its step too long, and "
        "if not, clipping cannot repair them",
        "weights": "create the model again, or load other weights; for finite ones `all(p.isfinite().all() for p in "
        "model.parameters())` is true",
        "gradient": f"look at its backward pass, usually at a root, a norm or a division at 0: {clipping}",
        "unknown": STOP_ON_NAN.code + " looks before each backward pass and stops there",
    }[origin.kind]


# --- The result of `%nbguard fix nan`: the layers that have to compute in float32, and the line that makes them.


@dataclass(frozen=True, slots=True, kw_only=True)
class NanRepair(Result):
    """The layer that made a value which is not finite, and whether float32 cures it."""

    kind: ClassVar[str] = "nan_repair"
    view: ClassVar[str] = "nbguard.training.profiler.analysis.nonfinite:nan_repair_blocks"
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
