"""A diagnosis as blocks, the verdict in a sentence, the findings with their commands, then every check."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from nbguard.render.blocks import Block, FactLines, Listing, Point, Points, Table, TableRow, Title
from nbguard.training.doctor.analysis.diagnosis import SEVERITIES, Check, CheckFinding, Diagnosis, Severity
from nbguard.units import counted

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
