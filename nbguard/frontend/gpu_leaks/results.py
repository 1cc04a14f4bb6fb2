"""The result of `pytest --gpu-leaks`, with the memory that tests left, the holders, and peaks. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.files import read_file, unreadable, write_file
from nbguard.plain_data import from_plain, to_json
from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.markup import clean
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes, signed

_NOT_MEASURED = "PyTorch was imported within it, or does not count the memory of this device"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory that a test or a fixture has made and left to one holder."""

    holder: str  # the way from where references start to the largest tensor: `tests/test_x.py: CACHE[3]`
    nbytes: int  # bytes of all its storages
    storages: int  # how many
    line: str = ""  # that allocated most of it; empty where unknown
    fixture: str = ""  # ended fixture that made or kept it, as in `module fixture net`; empty if the test did
    what: str = ""  # a few words on the holder

    @property
    def sentence(self) -> str:
        """Return the line on it."""
        amount = f"{format_bytes(self.nbytes)} in {counted(self.storages, 'storage')}"
        made = f", left by {self.fixture}" if self.fixture else ""
        line = f", allocated by {self.line}" if self.line else ""
        return f"{self.holder} holds {amount}{made}{line}{f' ({self.what})' if self.what else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOfTest:
    """The memory of one test, with its leaks and its peak."""

    test: str  # its id, as pytest writes it
    file: str  # its file, from the root folder of the tests
    line: int  # number of its first line
    leaks: tuple[HeldMemory, ...] = ()  # the largest first
    collected: int = 0  # bytes that only the garbage collector freed
    peak: int | None = None  # most bytes of its tensors at a time, or None if not measured
    limit: int | None = None  # the most that its mark allows; None without one
    kept_by_pytest: int = 0  # bytes on the instance of its class, which pytest keeps until the end

    @property
    def nbytes(self) -> int:
        """Return the bytes that it left."""
        return sum(leak.nbytes for leak in self.leaks)

    @property
    def is_above(self) -> bool:
        """Return whether its peak is above its limit."""
        return self.peak is not None and self.limit is not None and self.peak > self.limit

    @property
    def is_failed(self) -> bool:
        """Return whether it fails for its memory."""
        return bool(self.leaks) or self.is_above

    @property
    def is_worth_telling(self) -> bool:
        """Return whether there is anything to say about it."""
        return bool(self.leaks or self.collected or self.kept_by_pytest or self.limit is not None)

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines on its failure, the one that sums up first."""
        own = sum(leak.nbytes for leak in self.leaks if not leak.fixture)
        others = sum(leak.nbytes for leak in self.leaks if leak.fixture)
        heads = []
        if own:
            heads.append(f"the test left {format_bytes(own)} of tensors behind")
        if others:
            heads.append(f"fixtures that ended left {format_bytes(others)} of tensors behind")
        if self.is_above:
            heads.append(f"its tensors took {format_bytes(self.peak)} at a time, more than {format_bytes(self.limit)}")
        return ("; ".join(heads), *(leak.sentence for leak in self.leaks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLeaks(Result):
    """The result of a run of `pytest --gpu-leaks`."""

    kind: ClassVar[str] = "gpu_leaks"
    view: ClassVar[str] = "nbguard.frontend.gpu_leaks.results:gpu_leaks_blocks"

    tracked: str  # kind of device whose tensors counted, `cuda` or `cpu`; empty if PyTorch was not imported
    minimum: int  # bytes that a test might leave unnoticed
    judged: int  # number of tests that were judged: those that ended without an error
    tests: tuple[MemoryOfTest, ...]  # those that there is something to say about
    problem: str = ""  # why the watch ended early; empty where it did not

    @property
    def failed(self) -> tuple[MemoryOfTest, ...]:
        """Return the tests that failed for their memory."""
        return tuple(test for test in self.tests if test.is_failed)


def gpu_leaks_blocks(result: GpuLeaks) -> Iterator[Block]:
    """Yield the blocks with the number of leaking tests, their bytes and holders, and notes."""
    if result.problem:
        yield Line(result.problem, "strong")
    if not result.tracked:
        yield Line("no test imported PyTorch: there was nothing to judge")
        return
    where = "CPU tensors, as there is no GPU" if result.tracked == "cpu" else f"tensors on {result.tracked}"
    failed = result.failed
    if not failed:
        yield Line(f"none of {counted(result.judged, 'test')} left {format_bytes(result.minimum)} behind ({where})")
    else:
        nbytes = format_bytes(sum(test.nbytes for test in failed))
        leaking = counted(sum(bool(test.leaks) for test in failed), "test")
        yield Line(f"{leaking} of {result.judged} left {nbytes} behind ({where})", "strong")
        rows = tuple(
            TableRow(cells=(test.test, format_bytes(leak.nbytes), leak.holder, leak.fixture))
            for test in failed
            for leak in test.leaks
        )
        if rows:
            yield Table(rows=rows, figures=(1,), code=(0, 2), widest=120)
    for test in result.tests:
        if test.limit is not None and test.peak is None:
            yield Line(f"{test.test}: its peak was not measured: {_NOT_MEASURED}", "strong")
        elif test.limit is not None:
            how = "above" if test.is_above else "within"
            yield Line(f"{test.test}: peak {format_bytes(test.peak)}, {how} its limit of {format_bytes(test.limit)}")
    collected = [test for test in result.tests if test.collected]
    if collected:
        largest = max(collected, key=lambda test: test.collected)
        yield Line(
            f"{counted(len(collected), 'test')} left memory that only Python's garbage collector freed, "
            f"at most {format_bytes(largest.collected)} ({largest.test})",
            "dim",
        )
    kept = sum(test.kept_by_pytest for test in result.tests)
    if kept:
        yield Line(
            f"{format_bytes(kept)} are attributes of test classes' instances, which pytest keeps until the end: "
            "delete them in teardown_method",
            "dim",
        )


# --- The summary of a run in the terminal, in annotations for GitHub and in files. With xdist the controller writes it


# --- The comparison of two runs of `pytest --gpu-leaks`, here and on a base branch, as Markdown for a pull request. Pure.


MOST_BYTES = 64 << 20
"""Size of a file that is read."""
_MOST = 50
"""Tests that are listed."""


def read_result(text: bytes, name: str) -> GpuLeaks:
    """Return the result in a file of `--gpu-leaks-json` called `name`. Raises NbguardError if it was not written by that."""
    try:
        data = json.loads(text)
        if type(data) is not dict or data.get("kind") != GpuLeaks.kind:
            raise DamagedDataError("it was not written by --gpu-leaks-json")
        fields = {key: value for key, value in data.items() if key not in ("schema", "kind")}
        result: GpuLeaks = from_plain(GpuLeaks, fields, text=lambda each: clean(each, 300))
    except (ValueError, RecursionError) as error:
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
