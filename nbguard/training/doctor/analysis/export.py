"""Checks of export attempts made on copies, with their failures, and the steps that a server has to repeat."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean
from typing import ClassVar, Literal

from nbguard.libraries import ExportRepair, module_repair, output_repair
from nbguard.memory.core import advice
from nbguard.memory.core.advice import repair_export
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import Text, joined
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.training.doctor.analysis.step_trace import module_name
from nbguard.units import counted, format_time

# --- A model as it is to be served, with a copy that exports, the times of its calls, and outputs to compare with


OF_A_MODEL = "golden outputs and a limit are of a model: name one, as in  " + advice.diagnose().command

TOLERANCE = 1e-4
"""Difference, as a share of the largest output, up to which outputs of an exported or a later model count as the same."""
LATENCY, GOLDEN = "latency", "golden outputs"
"""Checks that a limit or a file was given for; their findings decide the exit status without `--strict`, too."""
EAGER = "eager"
"""The name of the user's own model among the ways to call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedModel(Result):
    """A copy of a model that exports, and the replacements in it."""

    kind: ClassVar[str] = "repaired_model"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.export:repaired_blocks"
    label: ClassVar[str] = "Repaired model"

    name: str  # of the variable that has it
    replaced: tuple[tuple[str, str, str], ...]  # (path, class before, class after)


def repaired_blocks(repaired: RepairedModel) -> Iterator[Block]:
    """Yield where the copy is, and the differences in it."""
    yield Title(
        f"`{repaired.name}` is a copy in eval mode that torch.export accepts; it computes exactly the same values", "strong"
    )
    rows = [(module_name(path), f"{before} → {after}") for path, before, after in repaired.replaced]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows or [("nothing had to be replaced", "")]))
    yield Line(f"`torch.export.export({repaired.name}, (batch,))`", "dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Calls of a model with one batch, one after another; each waits for its outputs. Times are nanoseconds."""

    calls: int
    p50: int
    p95: int
    mean: float

    @classmethod
    def of(cls, times: Sequence[int]) -> CallTimes:
        """Return the times of some calls, one at least."""
        ordered = sorted(times)
        p50, p95 = (ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
        return cls(calls=len(ordered), p50=p50, p95=p95, mean=fmean(ordered))

    def words(self, items: int) -> str:
        """Return percentiles and throughput for a batch of `items`."""
        rate = float(f"{items * 1e9 / max(self.mean, 1.0):.3g}")
        return f"p50 {format_time(self.p50)}, p95 {format_time(self.p95)}, {rate:,.{0 if rate >= 10 else 2}f} items/s"


def latency_check(times: Mapping[str, CallTimes], items: int, limit: int | None = None) -> Check:
    """Return the check of how long calls take.

    Args:
        times: by the way of export; `EAGER` is the model itself.
        items: of the batch.
        limit: nanoseconds that the 95th percentile of an export may have, or None if no limit was given. It is a problem if no
            export keeps to it, and worth a note if some do not, since one of them is served.
    """
    calls = min((each.calls for each in times.values()), default=0)
    evidence = "; ".join(f"{name} {each.words(items)}" for name, each in times.items())
    evidence = f"a batch of {items}, {counted(calls, 'call')} or more each: {evidence}"
    exports = {name: each.p95 for name, each in times.items() if name != EAGER}
    slow = [f"{name} {format_time(p95)}" for name, p95 in exports.items() if limit is not None and p95 > limit]
    if limit is None or (exports and not slow):
        return checked("export", LATENCY, evidence)
    if not exports:
        return ungated(LATENCY, "no export could be timed")
    quick = [name for name, p95 in exports.items() if p95 <= limit]
    finding = CheckFinding(
        severity="note" if quick else "problem",
        what=f"{'some exports take' if quick else 'each export takes'} longer than {format_time(limit)} for a batch of {items}",
        evidence=f"p95 of {counted(calls, 'call')} or more: {', '.join(slow)}",
        command=f"# serve one of those that keep to it: {', '.join(quick)}" if quick else _SMALLER,
    )
    return checked("export", LATENCY, evidence, finding)


_SMALLER = "# a smaller batch takes less time: check the size that the server gets"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFacts:
    """Outputs of the model for a batch in a file, and how far the outputs of now are from them."""

    file: str
    is_new: bool  # the file was written now
    items: int  # of the batch
    outputs: int  # tensors
    largest: float = 0.0  # difference of two values
    relative: float = 0.0  # to the largest value in the file
    versions: tuple[str, str] = ("", "")  # of PyTorch: that wrote it, and of now
    has_same_weights: bool | None = None  # None: they were not compared


def golden_check(facts: GoldenFacts) -> Check:
    """Return the check of outputs against a file's."""
    about = f"{counted(facts.outputs, 'output')} for a batch of {facts.items} in {facts.file}"
    if facts.is_new:
        finding = CheckFinding(
            severity="advice",
            what=f"{facts.file} was written; there was nothing to compare with",
            evidence=about,
            command=f"# keep {facts.file} with the code: later runs compare the model's outputs with it",
        )
        return checked("export", GOLDEN, f"written: {about}", finding)
    evidence = f"{about}: values differ by {facts.largest:.2g} at most"
    if facts.relative <= TOLERANCE:
        return checked("export", GOLDEN, evidence)
    finding = CheckFinding(
        severity="problem",
        what=f"the model's outputs differ from those in {facts.file}",
        evidence=f"by up to {facts.largest:.3g}, {facts.relative:.1e} of the largest value; {_cause(facts)}",
        command=_renewed(facts.file),
    )
    return checked("export", GOLDEN, evidence, finding)


def is_asked(check: Check) -> bool:
    """Say whether a limit or a file was given for a check."""
    return check.topic == "export" and check.name in (LATENCY, GOLDEN)


def ungated(name: str, reason: str) -> Check:
    """Return a check that was asked for and could not be made, which is no success."""
    finding = CheckFinding(
        severity="problem",
        what="a limit or a file was given, and could not be checked",
        evidence=reason,
        command="# put this right first, or ask without the limit and the file",
    )
    return checked("export", name, reason, finding)


def _cause(facts: GoldenFacts) -> str:
    """Return the other changes since the file was written."""
    if facts.has_same_weights is False:
        return "the weights are other ones"
    before, now = facts.versions
    weights = "the weights are the same" if facts.has_same_weights else "the weights were not compared"
    return f"{weights}, and PyTorch is {f'{now}, then {before}' if before != now else f'still {now}'}"


def _renewed(file: str) -> str:
    """Return the line that takes a file away, so that the next run writes it again."""
    why = "   # if the change is wanted: the next run writes it again"
    return Text(f"import os; os.remove({file!r}){why}", None, f"rm {shlex.quote(file)}{why}")


# --- export


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
