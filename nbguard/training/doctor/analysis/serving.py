"""A model as it is to be served, with a copy that exports, the times of its calls, and outputs to compare with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import ClassVar

from nbguard.memory.core import advice
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import Text
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked
from nbguard.training.doctor.analysis.step_trace import module_name
from nbguard.units import counted, format_time

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
    view: ClassVar[str] = "nbguard.training.doctor.analysis.serving:repaired_blocks"
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
