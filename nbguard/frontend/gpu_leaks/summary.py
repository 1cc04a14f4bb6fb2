"""The summary of a run in the terminal, in annotations for GitHub and in files. With xdist the controller writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.files import read_file, unreadable, write_file
from nbguard.frontend.gpu_leaks.results import GpuLeaks, MemoryOfTest
from nbguard.plain_data import from_plain, read_json, to_json
from nbguard.render.markup import clean
from nbguard.units import format_bytes, signed

# --- The comparison of two runs of `pytest --gpu-leaks`, here and on a base branch, as Markdown for a pull request. Pure.


MOST_BYTES = 64 << 20
"""Size of a file that is read."""
_MOST = 50
"""Tests that are listed."""


def read_result(text: bytes, name: str) -> GpuLeaks:
    """Return the result in a file of `--gpu-leaks-json` called `name`. Raises NbguardError if it was not written by that."""
    try:
        data = read_json(text)
        if type(data) is not dict or data.get("kind") != GpuLeaks.kind:
            raise DamagedDataError("it was not written by --gpu-leaks-json")
        fields = {key: value for key, value in data.items() if key not in ("schema", "kind")}
        result: GpuLeaks = from_plain(GpuLeaks, fields, text=lambda each: clean(each, 300))
    except ValueError as error:
        reason = str(error) if isinstance(error, NbguardError) else "it is no JSON"
        raise NbguardError(f"{name} cannot be used: {reason}") from None
    return result


def comment_on(result: GpuLeaks, base: GpuLeaks | None) -> str:
    """Return the comment on tests whose leaks or peaks changed since the base branch, new leaks first; without one, on all."""
    return "\n".join(_lines(result, base)) + "\n"


def _lines(result: GpuLeaks, base: GpuLeaks | None) -> Iterator[str]:
    before = {} if base is None else {test.test: test for test in base.tests}
    after = {test.test: test for test in result.tests}
    names = sorted({name for name in {*before, *after} if _is_different(before.get(name), after.get(name))})
    names.sort(key=lambda name: -(_nbytes(after.get(name)) - _nbytes(before.get(name))))
    total = sum(map(_nbytes, after.values()))
    change = "" if base is None else f" ({signed(total - sum(map(_nbytes, before.values())))} since the base branch)"
    yield f"### GPU memory of tests: {format_bytes(total)} left behind{change}"
    yield ""
    if not names:
        yield "No test changed." if base is not None else "No test left anything."
        return
    yield "| test | left | before | peak | before | holder |"
    yield "|---|--:|--:|--:|--:|---|"
    for name in names[:_MOST]:
        old, new = before.get(name), after.get(name)
        holder = "; ".join(leak.holder for leak in new.leaks) if new is not None else ""
        cells = (_left(new), _left(old), _peak(new), _peak(old))
        yield f"| {_code(name)} | {' | '.join(cells)} | {_code(holder)} |"
    if len(names) > _MOST:
        yield ""
        yield f"and {len(names) - _MOST} more"


def _is_different(old: MemoryOfTest | None, new: MemoryOfTest | None) -> bool:
    return (_nbytes(old), _peak(old)) != (_nbytes(new), _peak(new))


def _nbytes(test: MemoryOfTest | None) -> int:
    return 0 if test is None else test.nbytes


def _left(test: MemoryOfTest | None) -> str:
    return "" if test is None or not test.nbytes else format_bytes(test.nbytes)


def _peak(test: MemoryOfTest | None) -> str:
    return "" if test is None or test.peak is None else format_bytes(test.peak)


def _code(text: str) -> str:
    """Return a name as code in a cell of a table, where `|` would end the cell and a backquote the code."""
    return f"`{text.replace('`', chr(39)).replace('|', chr(166))}`" if text else ""


# --- The summary.


MEMORY, DEVICE, JUDGED, PROBLEM = "nbguard_memory", "nbguard_device", "nbguard_judged", "nbguard_problem"
"""Attributes of a report on a teardown. A worker of xdist sends its findings in them."""


class LeakSummary:
    """Gathers the findings on all tests, whichever process ran them."""

    def __init__(self, minimum: int, config: pytest.Config) -> None:
        self._minimum = minimum
        self._json: str | None = config.getoption("--gpu-leaks-json")
        self._comment: str | None = config.getoption("--gpu-leaks-comment")
        self._base = _base(config.getoption("--gpu-leaks-base"))
        self._tests: list[MemoryOfTest] = []
        self._judged = 0
        self._tracked = ""
        self._problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a report on a teardown."""
        self._problem = self._problem or getattr(report, PROBLEM, "")
        self._tracked = self._tracked or getattr(report, DEVICE, "")
        self._judged += bool(getattr(report, JUDGED, False))
        if (data := getattr(report, MEMORY, None)) is not None:
            self._tests.append(from_plain(MemoryOfTest, data))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Count a test with leaks as failed, where pytest would count the failed teardown as an error."""
        data = getattr(report, MEMORY, None)
        if data is None or not report.failed or not from_plain(MemoryOfTest, data).is_failed:
            return None
        return "failed", "F", ("FAILED", {"red": True})

    @property
    def result(self) -> GpuLeaks:
        """Return the result of the run so far."""
        return GpuLeaks(
            tracked=self._tracked,
            minimum=self._minimum,
            judged=self._judged,
            tests=tuple(sorted(self._tests, key=lambda test: test.test)),
            problem=self._problem,
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the section and, on GitHub, the annotations; write the file."""
        if terminalreporter.config.option.collectonly:
            return
        _count_once(terminalreporter, {test.test for test in self._tests if test.is_failed})
        result = self.result
        terminalreporter.section("gpu leaks", sep="-")
        terminalreporter.line(str(result).rstrip())
        try:
            if self._json is not None:
                write_file(self._json, to_json(result.to_data()))
            if self._comment is not None:
                write_file(self._comment, comment_on(result, self._base))
        except OSError as error:
            terminalreporter.line(f"the leaks could not be written: {error}", red=True)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for test in result.failed:
                for line in test.lines:
                    terminalreporter.line(_annotation(test, line))


def _base(file: str | None) -> GpuLeaks | None:
    """Return the result of another branch; raise pytest.UsageError if the file has none."""
    if file is None:
        return None
    try:
        return read_result(read_file(file, MOST_BYTES), file)
    except OSError as error:
        raise pytest.UsageError(f"--gpu-leaks-base: {unreadable(file, error)}") from None
    except NbguardError as error:
        raise pytest.UsageError(f"--gpu-leaks-base: {error}") from None


def _count_once(reporter: Any, failed: set[str]) -> None:
    """Remove tests that failed for their memory from the passed ones, where the good reports on their calls put them."""
    passed = reporter.stats.get("passed", [])
    passed[:] = [report for report in passed if report.nodeid not in failed]


def _annotation(test: MemoryOfTest, line: str) -> str:
    """Return the command that has GitHub show a line at the test in a pull request."""
    properties = f"file={_escaped(test.file, ':,')},line={test.line},title=GPU memory"
    return f"::error {properties}::{_escaped(f'{test.test}: {line}')}"


def _escaped(text: str, more: str = "") -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for character in more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
