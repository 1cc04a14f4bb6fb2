"""The result of `pytest --gpu-leaks`, with the memory that tests left, the holders, and peaks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

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
        yield Line("no test was judged: none ran with PyTorch imported")
        return
    where = "CPU tensors, as there is no GPU" if result.tracked == "cpu" else f"tensors on {result.tracked}"
    failed = result.failed
    if not result.judged:
        yield Line("no test was judged: none ended without an error")
    elif not failed:
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
