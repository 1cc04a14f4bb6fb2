"""A diagnosis as blocks: one line on the whole, the findings with their commands, then every check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from nbguard.doctor.analysis.diagnosis import TOPICS, Check, CheckFinding, Diagnosis, State
from nbguard.render.blocks import Block, Listing, Point, Points, Section, Table, TableRow, Title

_ORDER: tuple[State, ...] = ("problem", "advice", "note", "not checked", "ok")
_MANY = {"problem": "problems", "advice": "pieces of advice", "note": "notes", "not checked": "not checked", "ok": "in order"}
_ONE = {"problem": "problem", "advice": "piece of advice", "note": "note", "not checked": "not checked", "ok": "in order"}


def diagnosis_blocks(diagnosis: Diagnosis) -> Iterator[Block]:
    """Yield the count of each answer, the findings, the checks of each topic, and what was left aside."""
    states = Counter(check.state for check in diagnosis.checks)
    counts = " · ".join(
        f"{states[state]} {(_ONE if states[state] == 1 else _MANY)[state]}" for state in _ORDER if states[state]
    )
    subject = f"{diagnosis.subject}: " if diagnosis.subject else ""
    yield Title(f"{subject}{counts or 'nothing was asked'} · {diagnosis.seconds:.2g} s", "strong")
    if diagnosis.findings:
        yield Points(tuple(map(_point, diagnosis.findings)), is_numbered=False)
    for topic in TOPICS:
        checks = [check for check in diagnosis.checks if check.topic == topic]
        if checks:
            yield Section(topic)
            yield Table(rows=tuple(_rows(checks)), chips=(0,))
    if diagnosis.notes:
        yield Listing(sentences=diagnosis.notes)


def _rows(checks: Iterable[Check]) -> Iterator[TableRow]:
    """Yield a row for each check, and one for neighbours that were not made for the same reason."""
    for (state, evidence), same in groupby(checks, lambda check: (check.state, check.evidence)):
        names = [check.name for check in same]
        for name in (", ".join(names),) if state == "not checked" else names:
            yield TableRow(cells=(state, name, evidence))


def _point(finding: CheckFinding) -> Point:
    """Return a finding with its evidence, and each line of its command by itself."""
    lines = [finding.evidence, *(f"→ `{line}`" for line in finding.command.splitlines() if line.strip())]
    return Point(
        word=finding.severity,
        what=finding.what,
        lines=tuple(line for line in lines if line),
        warns=finding.severity == "problem",
    )
