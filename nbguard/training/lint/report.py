"""The findings in scripts and notebooks, as a result and in the formats of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from nbguard.render.github import workflow_command
from nbguard.render.html import Block, Title
from nbguard.render.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """A line that leaks, waits or trains something else than is meant."""

    code: str  # of the rule, such as NBG101
    name: str  # of the rule, in words: loss-kept
    file: str  # as it was named
    cell: int | None  # of a notebook: the number of the cell, from 1; None in a script
    line: int  # in the script or the cell, from 1
    column: int  # from 1
    end_line: int  # in the script or the cell, from 1
    message: str  # the matter and the way out, in a sentence
    fixable: bool  # whether `--fix` repairs it

    @property
    def place(self) -> str:
        """The file, the cell, the line and the column, as editors read them."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.file}:{cell}{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport(Result):
    """The answer of `nbguard lint FILE`."""

    kind: ClassVar[str] = "lint"
    view: ClassVar[str] = "nbguard.training.lint.report:lint_blocks"
    label: ClassVar[str] = "Leaks and slow lines"

    files: int  # that were read
    fixed: int = 0  # findings that were repaired, and are in the list no more
    findings: tuple[LintFinding, ...] = ()  # by file and line
    left_out: tuple[str, ...] = ()  # cells that are no Python, and files that could not be repaired: a sentence each


def lint_blocks(report: LintReport) -> Iterator[Block]:
    """Yield a line for each finding, and a last one with their number."""
    yield from (Title(_line(each)) for each in report.findings)
    yield Title(_summary(report))


def _line(finding: LintFinding) -> str:
    return f"{finding.place}: {finding.code} {'[*] ' if finding.fixable else ''}{finding.message}"


def _summary(report: LintReport) -> str:
    count, fixable = len(report.findings), sum(each.fixable for each in report.findings)
    fixed = f"; {report.fixed} repaired" if report.fixed else ""
    if not count:
        return f"nothing found in {_counted(report.files, 'file')}{fixed}"
    mended = f"; --fix repairs {fixable} of them [*]" if fixable else ""
    return f"{_counted(count, 'finding')} in {_counted(report.files, 'file')}{fixed}{mended}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --- formats of other programs


def as_github(report: LintReport) -> str:
    """Return the findings as commands of GitHub's workflows, which mark lines of a pull request. A cell has no line there."""
    return "\n".join(_github(each) for each in report.findings)


def _github(finding: LintFinding) -> str:
    is_script = finding.cell is None
    place = {"line": finding.line, "col": finding.column, "endLine": finding.end_line} if is_script else {}
    where = "" if is_script else f"cell {finding.cell}, line {finding.line}: "
    return workflow_command("warning", where + finding.message, file=finding.file, **place, title=f"nbguard {finding.code}")


def as_sarif(report: LintReport, version: str, rules: dict[str, tuple[str, str]]) -> str:
    """Return the findings as SARIF 2.1.0; `rules` has the name and the description of each rule by its code."""
    found = sorted({each.code for each in report.findings})
    driver = {
        "name": "nbguard",
        "version": version,
        "rules": [{"id": code, "name": rules[code][0], "shortDescription": {"text": rules[code][1]}} for code in found],
    }
    run = {"tool": {"driver": driver}, "results": [_sarif(each) for each in report.findings]}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1)


def _sarif(finding: LintFinding) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": finding.file}}
    location: dict[str, Any] = {"physicalLocation": physical}
    if finding.cell is None:
        physical["region"] = {"startLine": finding.line, "startColumn": finding.column, "endLine": finding.end_line}
    else:
        location["logicalLocations"] = [{"name": f"cell {finding.cell}, line {finding.line}"}]
    return {"ruleId": finding.code, "level": "warning", "message": {"text": finding.message}, "locations": [location]}
