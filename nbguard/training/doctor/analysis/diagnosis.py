"""A diagnosis of checks with their evidence, the findings that stand out with their commands, and its view as blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from nbguard.render.blocks import Block, FactLines, Listing, Point, Points, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.units import counted

Topic = Literal["environment", "determinism", "export", "ranks"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
DIAGNOSE_TOPICS: tuple[Topic, ...] = ("environment", "determinism", "export")
"""Topics of `nbguard.diagnose`, in the order of its report; ranks have `nbguard.diagnose_launch`."""

Severity = Literal["note", "advice", "problem"]
State = Literal["ok", "note", "advice", "problem", "not checked"]

SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "note")
"""From the gravest down."""


def chosen(topics: Collection[str], golden: str | None = None, max_latency: str | None = None) -> dict[str, Any]:
    """Return the topics of `nbguard.diagnose` as its arguments; the named ones are on, and all if none is named.

    With `golden` or `max_latency`, which are about exports, these are on, and alone where no topic is named.
    """
    asked = {"golden": golden, "max_latency": max_latency}
    default = ("export",) if any(asked.values()) else DIAGNOSE_TOPICS
    named = {*(topics or default), *(default if any(asked.values()) else ())}
    return {**{topic: topic in named for topic in DIAGNOSE_TOPICS}, **asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One thing that stands out. Code stands between backticks."""

    severity: Severity  # how much it matters
    what: str  # the fact in one sentence
    evidence: str  # the figure that it rests on
    command: str  # the one command that does something about it, or lines to paste; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question that was asked, and its answer."""

    topic: Topic
    name: str  # the subject of the question, in a word or two
    state: State  # that of its gravest finding; "not checked" is no "ok"
    evidence: str  # the examined figures; where it was not checked, the reason
    findings: tuple[CheckFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """The answers to all questions that were asked, in their order."""

    kind: ClassVar[str] = "diagnosis"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.diagnosis:diagnosis_blocks"
    label: ClassVar[str] = "Diagnosis"

    subject: str  # the Learner or model that was tried, by its class; empty if none was given
    checks: tuple[Check, ...]  # by topic, in the order of making
    has_gpu: bool | None = None  # whether the driver names an NVIDIA GPU; None if it was not asked
    notes: tuple[str, ...] = ()  # parts that the checks could not examine or put back, in words
    seconds: float = 0.0  # that the checks took

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        """Return the findings of all checks, the gravest first."""
        each = [finding for check in self.checks for finding in check.findings]
        return tuple(sorted(each, key=lambda finding: SEVERITIES.index(finding.severity)))

    @property
    def worst(self) -> Severity | None:
        """Return the severity of the gravest finding; None if nothing stands out."""
        return min((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)


def checked(topic: Topic, name: str, evidence: str, *findings: CheckFinding) -> Check:
    """Return a check that was made, in the state of its gravest finding."""
    state: State = min((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
    return Check(topic=topic, name=name, state=state, evidence=evidence, findings=findings)


def not_checked(topic: Topic, name: str, reason: str) -> Check:
    """Return a check that could not be made, with the reason."""
    return Check(topic=topic, name=name, state="not checked", evidence=reason)


# --- A diagnosis as blocks, the verdict in a sentence, the findings with their commands, then every check.


_NOUNS: dict[Severity, tuple[str, ...]] = {
    "problem": ("problem",),
    "advice": ("piece of advice", "pieces of advice"),
    "note": ("note",),
}


def diagnosis_blocks(diagnosis: Diagnosis, *, whole: bool = False) -> Iterator[Block]:
    """Yield the verdict, the findings, the checks, and the parts left aside.

    `whole`: whether text, too, shows each check with its figures. HTML has them behind a line.
    """
    yield Title(_verdict(diagnosis), "strong")
    if diagnosis.findings:
        yield Points(tuple(map(_point, diagnosis.findings)), is_numbered=False)
    if diagnosis.checks:
        rows = tuple(TableRow(cells=(check.state, check.topic, check.name, check.evidence)) for check in diagnosis.checks)
        brief = None if whole else FactLines(tuple(_short(diagnosis.checks)))
        yield Table(rows=rows, chips=(0,), fold=counted(len(rows), "check"), brief=brief)
    if diagnosis.notes:
        yield Listing(sentences=diagnosis.notes)
    shown = "" if whole or not diagnosis.checks else "; `--all` shows their figures"
    yield Title(f"{counted(len(diagnosis.checks), 'check')} in {diagnosis.seconds:.2g} s{shown}", "dim")


def _verdict(diagnosis: Diagnosis) -> str:
    where = diagnosis.subject or "this machine"
    missing = "; it has no NVIDIA GPU" if diagnosis.has_gpu is False and not diagnosis.subject else ""
    if not diagnosis.checks:
        return f"Nothing was asked about {where}"
    if all(check.state == "not checked" for check in diagnosis.checks):
        return f"Nothing could be checked {'of' if diagnosis.subject else 'on'} {where}{missing}"
    found = Counter(finding.severity for finding in diagnosis.findings)
    counts = [counted(found[severity], *_NOUNS[severity]) for severity in SEVERITIES if found[severity]]
    if not counts:
        return f"No problem found {'in' if diagnosis.subject else 'on'} {where}{missing}"
    return f"{where[0].upper()}{where[1:]}: {', '.join(counts)}{missing}"


def _short(checks: Iterable[Check]) -> Iterator[tuple[str, str]]:
    """Yield a line of the checks that are in order, and one for each reason why others were not made."""
    fine = [check.name for check in checks if check.state == "ok"]
    if fine:
        yield "in order", ", ".join(fine)
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for check in checks:
        if check.state == "not checked":
            reasons[check.evidence].append(check.name)
    for reason, names in reasons.items():
        yield "not checked", f"{', '.join(names)}: " + reason


def _point(finding: CheckFinding) -> Point:
    """Return a finding with its evidence, and each line of its command by itself."""
    lines = [finding.evidence, *("→ `" + line + "`" for line in finding.command.splitlines() if line.strip())]
    return Point(
        word=finding.severity,
        what=finding.what,
        lines=tuple(line for line in lines if line),
        warns=finding.severity == "problem",
    )
