"""A diagnosis of checks, each with its evidence, and the findings that stand out, each with the command that acts on it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from nbguard.render.result import Result

Topic = Literal["environment", "determinism", "export", "ranks"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
DIAGNOSE_TOPICS: tuple[Topic, ...] = ("environment", "determinism", "export")
"""Topics of `nbguard.diagnose`, in the order of its report; ranks have `nbguard.diagnose_launch`."""

Severity = Literal["note", "advice", "problem"]
State = Literal["ok", "note", "advice", "problem", "not checked"]

SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "note")
"""From the gravest down."""


def chosen(topics: Collection[str], golden: str | None = None, max_latency: str | None = None) -> dict[str, Any]:
    """Return the topics of `nbguard.diagnose` as its arguments: on are those that are named, all where none is.

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
    view: ClassVar[str] = "nbguard.training.doctor.analysis.diagnosis_view:diagnosis_blocks"
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
