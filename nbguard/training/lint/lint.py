"""Files under rules. Selection, exempt lines, findings, and repair where it is certain."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbguard.errors import NbguardError
from nbguard.files import read_file, write_file
from nbguard.render.html import Block, Title
from nbguard.render.result import Result
from nbguard.render.text import workflow_command
from nbguard.spelling import did_you_mean
from nbguard.training.lint.program import Hit, ParsedProgram, Rule, first_of_each_line
from nbguard.training.lint.rules import RULES
from nbguard.training.lint.source import LARGEST, Edit, Source, files_of, notebook_source, read_source, repaired

# --- The findings in scripts and notebooks, as a result and in the formats of other programs


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
    view: ClassVar[str] = "nbguard.training.lint.lint:lint_blocks"
    label: ClassVar[str] = "Leaks and slow lines"

    files: int  # that were read
    fixed: int = 0  # findings that were repaired, and are in the list no more
    findings: tuple[LintFinding, ...] = ()  # by file and line
    left_out: tuple[str, ...] = ()  # cells that are no Python, and files that could not be repaired: a sentence each


def lint_blocks(report: LintReport) -> Iterator[Block]:
    """Yield a line for each finding, and a last one with their number."""
    yield from (Title(_report_line(each)) for each in report.findings)
    yield Title(_summary(report))


def _report_line(finding: LintFinding) -> str:
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


# --- lint


_EXEMPT = re.compile(r"#\s*noqa(?::\s*(?P<codes>[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*))?", re.IGNORECASE)


def selected(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules whose codes begin with one of `select`, or all, without those that begin with one of `ignore`.

    Raises:
        NbguardError: no rule begins so.
    """
    for prefix in (*select, *ignore):
        if prefix != "ALL" and not any(rule.code.startswith(prefix.upper()) for rule in RULES):
            question = did_you_mean(prefix, (rule.code for rule in RULES))
            raise NbguardError(f"no rule's code begins with {prefix!r}: {question or 'docs/guide/lint.md lists them'}")
    chosen = tuple(prefix.upper() for prefix in select if prefix != "ALL") or ("",)
    left_out = tuple(prefix.upper() for prefix in ignore)
    return tuple(rule for rule in RULES if rule.code.startswith(chosen) and not (left_out and rule.code.startswith(left_out)))


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source with its hits, each with its rule."""

    source: Source
    hits: tuple[tuple[Rule, Hit], ...]


def check(source: Source, rules: Iterable[Rule] = RULES) -> CheckedSource:
    """Return the hits of a source by line, without those that a comment exempts."""
    program = ParsedProgram(source)
    if not program.uses_torch:
        return CheckedSource(source, ())
    hits = [
        (rule, hit)
        for rule in rules
        if source.is_notebook or not rule.in_notebooks_only
        for hit in first_of_each_line(rule.find(program))
        if not _is_exempt(source, hit.node, rule.code)
    ]
    return CheckedSource(source, tuple(sorted(hits, key=lambda pair: (_line(pair[1].node), pair[0].code))))


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _is_exempt(source: Source, node: ast.AST, code: str) -> bool:
    """Say whether the first or the last line of a node has `# noqa`, for all rules or for this one."""
    first, last = _line(node), int(getattr(node, "end_lineno", 1))
    is_block = isinstance(node, (ast.For, ast.While, ast.With))
    for line in {first} if is_block else {first, last}:
        if found := _EXEMPT.search(source.lines[line - 1]):
            codes = found["codes"]
            if codes is None or code in re.split(r"[,\s]+", codes.upper()):
                return True
    return False


def lint(paths: Iterable[str], rules: Iterable[Rule] = RULES, *, fix: bool = False) -> tuple[LintReport, list[NbguardError]]:
    """Look at scripts, notebooks and folders of them.

    Args:
        paths: files and folders.
        rules: those that apply.
        fix: whether to repair findings where that is certain.

    Returns:
        The report, and an error for each file that cannot be used.
    """
    findings: list[LintFinding] = []
    left_out: list[str] = []
    errors = []
    files = fixed = 0
    rules = tuple(rules)
    for path in dict.fromkeys(files_of(paths)):
        try:
            checked = check(read_source(path), rules)
            if fix and any(hit.edits for _, hit in checked.hits):
                count = _repair(checked)
                fixed += count
                if not count:
                    left_out.append(f"{path}: it is not repaired, as its JSON is written in a form that would change")
                checked = check(read_source(path), rules)
        except NbguardError as error:
            errors.append(error)
            continue
        except RecursionError:
            errors.append(NbguardError(f"{path} is nested too deeply to be checked at"))
            continue
        files += 1
        findings += [_finding(checked.source, rule, hit) for rule, hit in checked.hits]
        left_out += checked.source.unparsed
    return LintReport(files=files, fixed=fixed, findings=tuple(findings), left_out=tuple(left_out)), errors


def lint_cells(cells: Iterable[str]) -> tuple[LintFinding, ...]:
    """Return the findings in a notebook's code cells, which are counted from 1 on. A cell that is no Python has none."""
    try:
        checked = check(notebook_source("notebook.ipynb", enumerate(cells, start=1)))
    except RecursionError:
        return ()
    return tuple(_finding(checked.source, rule, hit) for rule, hit in checked.hits)


def _finding(source: Source, rule: Rule, hit: Hit) -> LintFinding:
    line, column = _line(hit.node), int(getattr(hit.node, "col_offset", 0))
    place, end = source.places[line - 1], source.places[int(getattr(hit.node, "end_lineno", line)) - 1]
    return LintFinding(
        code=rule.code,
        name=rule.name,
        file=source.path,
        cell=place.cell,
        line=place.line,
        column=len(source.lines[line - 1].encode()[:column].decode("utf-8", "ignore")) + 1,
        end_line=end.line,
        message=hit.message,
        fixable=bool(hit.edits),
    )


def _repair(checked: CheckedSource) -> int:
    """Repair a file; return the number of findings that are repaired, 0 where the rest of the file would change."""
    path = checked.source.path
    taken: list[Edit] = []
    count = 0
    for _, hit in checked.hits:
        if hit.edits and not any(_overlap(new, old) for new in hit.edits for old in taken):
            taken += hit.edits
            count += 1
    data = repaired(checked.source, read_file(path, LARGEST), taken)
    if data is None:
        return 0
    try:
        write_file(path, data)
    except OSError as error:
        raise NbguardError(f"{path} cannot be written: {error.strerror}") from None
    return count


def _overlap(one: Edit, other: Edit) -> bool:
    return one.line == other.line and one.start <= other.end and other.start <= one.end
