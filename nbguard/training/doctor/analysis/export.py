"""Checks of export attempts made on copies, with their failures, and the steps that a server has to repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from nbguard.libraries import ExportRepair, module_repair, output_repair
from nbguard.memory.core.advice import repair_export
from nbguard.texts import joined
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.training.doctor.analysis.serving import (
    EAGER,
    GOLDEN,
    LATENCY,
    TOLERANCE,
    CallTimes,
    GoldenFacts,
    golden_check,
    latency_check,
    ungated,
)
from nbguard.training.doctor.analysis.step_trace import module_name
from nbguard.units import counted

FORMATS = ("torch.export", "dynamic batch", "strict", "jit.trace", "jit.script", "ONNX")
"""The export methods, in the order of their trial."""
OUTDATED = ("jit.trace", "jit.script")
"""TorchScript: PyTorch warns that it is on its way out, and points to `torch.export`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailure:
    """One reason why a model cannot be exported as it is."""

    error: str  # class of the error
    message: str  # its first line
    module: str = ""  # path of the module whose forward pass failed
    module_class: str = ""  # its class with its module, such as torch.nn.modules.linear.Linear
    line: str = ""  # the line of code, as layers.py:81 in forward()
    code: str = ""  # that line's text
    output: str = ""  # class of an output that no program can return, such as transformers.cache_utils.DynamicCache
    refused: int | None = None  # items of a batch that the exported model does not take; then it was exported
    site: tuple[str, int, str] = ("", 0, "")  # (file, number of the line, function) of `line`
    where: str = ""  # the statement with torch.where that computes the same as the branch at that line
    cond: str = ""  # a call of torch.cond for it, whose sides are still to be written

    @property
    def rewrite(self) -> str:
        """Return the statement that cures it, with torch.where if it is a branch on values."""
        return self.where if self.is_branch else ""

    @property
    def is_branch(self) -> bool:
        """Say whether the path depends on values there."""
        return any(mark in f"{self.error} {self.message}" for mark in _ON_VALUES)

    @property
    def repair(self) -> ExportRepair | None:
        """Return the known cure, or None."""
        return output_repair(self.output) if self.output else module_repair(self.module_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """Exported against eager, for a batch of one size."""

    items: int
    largest: float  # difference of two values
    relative: float  # to the largest value of the eager model; NaN where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenValue:
    """Something of the batch that was traced and stays in the trace for good."""

    kind: Literal["branch", "number", "size", "value"]  # the last: the line is not known
    line: str = ""  # as In[7], line 3 in forward()
    code: str = ""  # that line's text
    rewrite: str = ""  # the statement with torch.where that computes the same as the branch there
    batch: str = ""  # a batch for which the trace computes something else, as in: with the signs turned; empty: none did
    largest: float | None = None  # the largest difference for that batch; infinite where the trace fails


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAttempt:
    """One way of export, tried."""

    name: str  # one of FORMATS
    passes: bool
    seconds: float = 0.0
    failures: tuple[ExportFailure, ...] = ()
    differences: tuple[ValueDifference, ...] = ()
    frozen: tuple[FrozenValue, ...] = ()  # of a trace
    times: CallTimes | None = None  # of calls of the exported model; None: there were none
    reason: str = ""  # why it was not tried; then it neither passes nor fails


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """A callback that changes the model's inputs or outputs."""

    callback: str  # its class
    event: str  # before_batch or after_pred
    line: str  # at which it does so


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """All attempts, and the things outside of the model that belong to it."""

    attempts: tuple[ExportAttempt, ...]
    eager: CallTimes  # of calls of the eager model
    items: int  # of the batch
    preprocessing: tuple[str, ...] = ()  # steps before the model, which no export has
    prepares: str = ""  # the call of something of the Learner's that does these steps to an item; empty: none is known
    inputs: tuple[str, ...] = ()  # that the model is called with, as in: float32 4×3×32×32 from -2.12 to 2.64
    changes: tuple[BatchChange, ...] = ()  # by callbacks, which no export has
    is_learner: bool = True  # a model without a Learner is not written by `learn.export()`
    unpicklable: tuple[str, ...] = ()  # objects that `learn.export()` writes by name, and a server lacks
    notes: tuple[str, ...] = ()


def export_checks(
    facts: ExportFacts,
    learn: str = "learn",
    batch: str = "",
    *,
    limit: int | None = None,
    golden: GoldenFacts | None = None,
) -> tuple[Check, ...]:
    """Return a check for each attempt, and the checks of the model's surroundings.

    Args:
        facts: results of the attempts.
        learn: name of the Learner or the model, for commands.
        batch: likewise of the batch; empty where it is the loader's.
        limit: nanoseconds that a call may take, or None if no limit was given.
        golden: the comparison of outputs with a file, or None if no file was given.
    """
    repair = repair_export(learn, batch).command
    checks = [_attempt(attempt, repair) for attempt in facts.attempts]
    callbacks = (_callbacks(facts),) if facts.is_learner else ()
    times = {EAGER: facts.eager, **{each.name: each.times for each in facts.attempts if each.times is not None}}
    compared = () if golden is None else (golden_check(golden),)
    served = (latency_check(times, facts.items, limit), *compared)
    return (*checks, *served, _preprocessing(facts, learn), *callbacks, _pickled(facts))


def no_export(reason: str, *, limit: int | None = None, golden: str = "") -> tuple[Check, ...]:
    """Return the checks of an export that could not be tried; with a limit or a file, that it could not is a problem."""
    asked = [name for name, given in ((LATENCY, limit), (GOLDEN, golden)) if given]
    return (*(not_checked("export", name, reason) for name in FORMATS), *(ungated(name, reason) for name in asked))


def _attempt(attempt: ExportAttempt, repair: str) -> Check:
    if attempt.reason:
        return not_checked("export", attempt.name, attempt.reason)
    if not attempt.passes:
        findings = [_failure(attempt, failure, repair) for failure in attempt.failures]
        return checked("export", attempt.name, f"{counted(len(findings), 'failure')} in {attempt.seconds:.1f} s", *findings)
    sizes = ", ".join(f"{each.items}" for each in attempt.differences)
    worst = max((each.largest for each in attempt.differences), default=0.0)
    values = f"; batches of {sizes}: values differ by {worst:.2g} at most" if sizes else ""
    until = "; PyTorch is retiring TorchScript" if attempt.name in OUTDATED else ""
    evidence = f"passes in {attempt.seconds:.1f} s{values}{until}"
    return checked("export", attempt.name, evidence, *_values(attempt), *_frozen(attempt, repair))


def _failure(attempt: ExportAttempt, failure: ExportFailure, repair: str) -> CheckFinding:
    where = module_name(failure.module) if failure.module else "the model"
    kind = f" ({failure.module_class.rpartition('.')[2]})" if failure.module_class else ""
    place = f" at {failure.line}" if failure.line else ""
    code = f": `{failure.code}`" if failure.code else ""
    if failure.refused is not None:
        what = f"{attempt.name}: the exported model refuses a batch of {failure.refused}"
    elif failure.output:
        what = f"{attempt.name}: `{where}`{kind} returns a {failure.output.rpartition('.')[2]}, which cannot be exported{place}"
    else:
        what = f"{attempt.name}: `{where}`{kind} cannot be exported{place}"
    known = failure.repair
    is_repaired = known is not None and bool(known.replacement or known.setting) and attempt.name not in OUTDATED
    return CheckFinding(
        severity="note" if attempt.name in ("strict", *OUTDATED) else "advice",
        what=what,
        evidence=f"{failure.error}: {failure.message}{code}{_sizes(attempt) if failure.refused is not None else ''}",
        command=repair if is_repaired else _advice(attempt, failure, repair),
    )


def _rewritten(statement: str, line: str, repair: str) -> str:
    """Return the lines that cure a branch, the statement in its place, and the command that makes a copy with it."""
    return joined("\n", (f"{statement}   # instead of the branch at {line}", repair))


def refusal(failure: ExportFailure, model: str) -> str:
    """Return why no copy of a model exports, with the line and what to do there."""
    name = failure.module_class.rpartition(".")[2] or model
    if failure.repair is not None:
        return f"{name} cannot be replaced: {failure.repair.reason}"
    place = f" at {failure.line}: `{failure.code}`" if failure.line else ""
    return f"{name} cannot be replaced: {failure.message}{place}; {_cure(failure)}"


def _advice(attempt: ExportAttempt, failure: ExportFailure, repair: str) -> str:
    """Return what to do about a failure that no replacement cures."""
    if attempt.name in OUTDATED:
        return "# PyTorch is retiring TorchScript: use torch.export's program instead"
    if failure.repair is not None:
        return f"# {failure.repair.reason}"
    return _rewritten(failure.rewrite, failure.line, repair) if failure.rewrite else f"# {_cure(failure)}"


def _cure(failure: ExportFailure) -> str:
    """Return what to write instead of the line that fails, in words."""
    if failure.is_branch and failure.cond:
        return f"the path depends on values: {failure.cond}"
    known = (advice for mark, advice in _BY_MESSAGE if mark in f"{failure.error} {failure.message}")
    return next(known, "export the model without this module, or replace it with PyTorch's own modules")


_ON_VALUES = (
    "GuardOnDataDependent",
    "DATA_DEPENDENT",
    "Data-dependent branching",
    "Could not guard on data-dependent",
    "depends on the value of",
)
"""In the messages of exporters about a path that depends on values."""
_FIXED = "a size is fixed in the code: use x.shape[0] instead of a number or len(x)"
_KEYWORDS = "name the inputs in forward(): PyTorch fixes the sizes of **kwargs"
_BY_MESSAGE = (
    (
        "GuardOnDataDependent",
        "the path depends on values: use torch.where or torch.cond instead of `if`",
    ),
    (
        "DATA_DEPENDENT",
        "the path or a shape depends on values: use torch.where or torch.cond instead of `if`",
    ),
    ("Data-dependent branching", "the path depends on values: use torch.where or torch.cond instead of `if`"),
    ("Must provide a tree_name", _KEYWORDS),
    ("name 'L' is not defined", _KEYWORDS),  # 2.14 exports such a model, and its check of sizes fails
    ("is refused", "the code treats one size differently: pad to two on the server, or export that size separately"),
    (
        "Could not guard on data-dependent",
        "a shape depends on values: mask instead of cutting, or state its bounds with torch._check",
    ),
    ("Constraints violated", _FIXED),
    (".numpy()", "use torch functions: numpy's are not part of a graph"),
    ("specialized", _FIXED),
)


def _values(attempt: ExportAttempt) -> Iterator[CheckFinding]:
    for each in attempt.differences:
        if not each.relative <= TOLERANCE:
            yield CheckFinding(
                severity="problem",
                what=f"{attempt.name}: the exported model computes different values for a batch of {each.items}",
                evidence=f"they differ by up to {each.largest:.3g}, {each.relative:.1e} of the largest value{_sizes(attempt)}",
                command="# it fixes a value or a branch of the traced batch: compute that with tensors",
            )
            return


def _frozen(attempt: ExportAttempt, repair: str) -> Iterator[CheckFinding]:
    """Yield the values of one batch that a trace holds, the branches that are known to matter first."""
    for value in attempt.frozen:
        if value.kind == "size":
            continue
        where = f"the {_FROZEN[value.kind]} at {value.line}" if value.line else "something"
        code = f"`{value.code}`; " if value.code else ""
        if value.largest is None:
            yield CheckFinding(
                severity="note",
                what=f"{attempt.name}: {where} is frozen for this batch",
                evidence=f"{code}batches with other values gave the same results",
                command=_UNFROZEN[value.kind],
            )
            continue
        wrong = "the trace fails" if value.largest == inf else f"values differ by up to {value.largest:.3g}"
        yield CheckFinding(
            severity="problem",
            what=f"{attempt.name}: {where} is frozen for this batch",
            evidence=f"{code}for a batch {value.batch} {wrong}",
            command=_rewritten(value.rewrite, value.line, repair) if value.rewrite else _UNFROZEN[value.kind],
        )


_FROZEN = {"branch": "branch", "number": "number that is read", "value": "value"}
_UNFROZEN = {
    "branch": "# torch.where or torch.cond instead of `if`, and torch.export instead of a trace",
    "number": "# compute with the tensor instead of the number, or export with torch.export",
    "value": "# it fixes a value or a branch of the traced batch: compute that with tensors",
}


def _sizes(attempt: ExportAttempt) -> str:
    """Return the lines at which a trace takes a size for a number, to go on with; empty if there are none."""
    sizes = [f"{value.line} (`{value.code}`)" for value in attempt.frozen if value.kind == "size"]
    return f"; a size becomes a number at {', '.join(sizes[:3])}" if sizes else ""


def _preprocessing(facts: ExportFacts, learn: str) -> Check:
    if not facts.preprocessing:
        return not_checked("export", "preprocessing", "there are no loaders with transforms to read")
    finding = CheckFinding(
        severity="note",
        what="no export includes the loaders' transforms, so a server has to repeat them",
        evidence=f"{'; '.join(facts.preprocessing)}; after them the model gets {', '.join(facts.inputs)}",
        command=f"{learn}.{facts.prepares}   # does them to an item" if facts.prepares else "# do the same on the server",
    )
    return checked("export", "preprocessing", counted(len(facts.preprocessing), "step"), finding)


def _callbacks(facts: ExportFacts) -> Check:
    findings = [
        CheckFinding(
            severity="advice",
            what=f"{change.callback} changes {_CHANGED[change.event]} in {change.event}, but the exported model does not",
            evidence=f"at {change.line}; an export contains only the model, not the callbacks",
            command="# do the same in forward() of the model, or on the server",
        )
        for change in facts.changes
    ]
    return checked("export", "callbacks", "some change a batch or a prediction", *findings) if findings else _CONTENT


_CHANGED = {"before_batch": "each batch", "after_pred": "each prediction"}
_CONTENT = checked("export", "callbacks", "none of yours changes a batch or a prediction outside of training")


def _pickled(facts: ExportFacts) -> Check:
    if not facts.is_learner:
        return _saved(facts)
    if not facts.unpicklable:
        return checked("export", "learn.export()", "every object pickled by name comes from an importable module")
    finding = CheckFinding(
        severity="advice",
        what="`load_learner` elsewhere will not find objects defined in the notebook",
        evidence="pickled by name only: " + ", ".join(facts.unpicklable[:8]),
        command="# move it into a module, such as  %%writefile transforms.py , and import it here and there",
    )
    return checked("export", "learn.export()", counted(len(facts.unpicklable), "object"), finding)


def _saved(facts: ExportFacts) -> Check:
    """Return the check of a whole model that is written by `torch.save`: its values alone need no class."""
    name = "torch.save(model)"
    if not facts.unpicklable:
        return checked("export", name, "every object pickled by name comes from an importable module")
    finding = CheckFinding(
        severity="note",
        what="a file from torch.save cannot be loaded elsewhere as a whole model",
        evidence="by name only, or not at all: " + ", ".join(facts.unpicklable[:8]),
        command='torch.save(model.state_dict(), "model.pt")   # the values only; share the code as a module',
    )
    return checked("export", name, counted(len(facts.unpicklable), "object"), finding)
