"""Files under rules. Selection, exempt lines, findings, and repair where it is certain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbguard.errors import NbguardError
from nbguard.files import read_file, write_file
from nbguard.spelling import did_you_mean
from nbguard.training.lint.program import ParsedProgram
from nbguard.training.lint.report import LintFinding, LintReport
from nbguard.training.lint.rule import Hit, Rule, first_of_each_line
from nbguard.training.lint.rules import RULES
from nbguard.training.lint.source import LARGEST, Edit, Source, files_of, notebook_source, read_source, repaired

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
