"""The hooks in the tests of one process. They follow tests and fixtures, and judge each test.

A test is judged after its teardown and the report on that, since its fixtures' values are not used any more then.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from nbguard.errors import in_one_line, line_of
from nbguard.frontend.gpu_leaks.births import TEST, TensorBirths
from nbguard.frontend.gpu_leaks.results import HeldMemory, MemoryOfTest
from nbguard.frontend.gpu_leaks.summary import DEVICE, JUDGED, MEMORY, PROBLEM, LeakSummary
from nbguard.memory.scan.devices.counters import counted_devices
from nbguard.memory.scan.devices.cuda import nested_stats, tracked_device
from nbguard.plain_data import to_plain
from nbguard.units import parse_bytes

if TYPE_CHECKING:
    from nbguard.memory.reports.notices.notice import StorageKey

# --- The most memory that a test's tensors take at a time, for tests with a mark.


class CpuPeak:
    """The bytes of CPU tensors that a test makes, and their peak, by the births and deaths of their storages.

    Storages that a test only uses, a session's model say, do not count, and neither do the temporaries inside of an operation.
    """

    def __init__(self) -> None:
        from nbguard.memory.scan.storage_events import StorageMode

        self.peak = 0
        self._sizes: list[int] = []
        self._now = 0
        self._mode = StorageMode(self, "cpu")

    def born(self, nbytes: int, op: object, *, is_older: bool) -> int:
        """Count a storage that an operation has made; return its number."""
        del op
        self._sizes.append(0 if is_older else nbytes)
        self._now += self._sizes[-1]
        self.peak = max(self.peak, self._now)
        return len(self._sizes) - 1

    def died(self, token: int) -> None:
        """Count a storage no longer."""
        self._now -= self._sizes[token]

    def phase(self) -> AbstractContextManager[Any]:
        """Return the context around a phase of the test."""
        return self._mode


class CudaPeak:
    """The most that was allocated on one device above the bytes that were there before the test, by the allocator's counters.

    A peak that rose is the test's own. One that did not bounds it from above; only where that is more than the limit, as an
    earlier test took more, the counter is reset before the test.
    """

    def __init__(self, limit: int) -> None:
        self._torch: Any = sys.modules["torch"]
        self._before = {device.device: device for device in self._devices()}
        for device in self._before.values():
            if (device.peak or 0) - device.allocated > limit:
                self._torch.cuda.reset_peak_memory_stats(device.device)

    def _devices(self) -> Any:
        return counted_devices(nested_stats(self._torch)) if self._torch.cuda.is_initialized() else ()

    @property
    def peak(self) -> int:
        """Return the bytes, or a bound that is within the limit."""
        peaks = [0]
        for device in self._devices():
            before = self._before.get(device.device)
            peaks.append((device.peak or 0) - (0 if before is None else before.allocated))
        return max(peaks)

    def phase(self) -> AbstractContextManager[Any]:
        """Return the context around a phase of the test."""
        return nullcontext()


def peak_of(tracked: str, limit: int) -> CpuPeak | CudaPeak | None:
    """Return the measure of a test's peak on a kind of device, or None if it has none."""
    return CpuPeak() if tracked == "cpu" else CudaPeak(limit) if tracked == "cuda" else None


# --- Sizes that the user gives, on the command line and in marks. A wrong one is an error of usage, in one line.


_NAMES = ("peak", "keeps")


@dataclass(frozen=True, slots=True)
class MemoryAllowance:
    """The bytes that `@pytest.mark.gpu_memory(...)` allows a test. A limit that it does not give is None."""

    peak: int | None = None  # most that its tensors may take at a time
    keeps: int | None = None  # that it may leave


def size_of(size: object, where: str) -> int:
    """Return a size in bytes. Raises pytest.UsageError on a text or value that is not a size."""
    try:
        if isinstance(size, str):
            return parse_bytes(size)
    except ValueError as error:
        raise pytest.UsageError(f"{where}: {error}") from None
    raise pytest.UsageError(f"{where}: {type(size).__name__} is not a size; write it as '2GiB'")


def allowance_of(item: pytest.Item) -> MemoryAllowance:
    """Return the allowance of the nearest mark of a test. Raises pytest.UsageError if the mark cannot be used."""
    mark = item.get_closest_marker("gpu_memory")
    if mark is None:
        return MemoryAllowance()
    where = f"{item.nodeid}: gpu_memory"
    if mark.args or not mark.kwargs or not mark.kwargs.keys() <= {*_NAMES}:
        raise pytest.UsageError(f"{where} takes peak= and keeps=, such as gpu_memory(peak='2GiB')")
    return MemoryAllowance(**{name: size_of(size, f"{where}({name}=)") for name, size in mark.kwargs.items()})


# --- The hooks and the judgement.


_INSTANCE = "instance of the test's class"
"""Label of the root for a test's own attributes on `self`. pytest keeps the instance until the end of the run."""


def watch_tests(config: pytest.Config) -> None:
    """Judge the tests of this process, and sum up unless it is a worker of xdist's. Raises pytest.UsageError on a bad size."""
    minimum = size_of(config.getoption("--gpu-leaks-min"), "--gpu-leaks-min")
    config.pluginmanager.register(LeakWatch(minimum, lines=config.getoption("--gpu-leaks-lines")), "nbguard-leak-watch")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeakSummary(minimum, config), "nbguard-leak-summary")


class LeakWatch:
    """The hooks. A failure of nbguard's own never fails a test. The summary tells it, and the watch ends."""

    def __init__(self, minimum: int, *, lines: bool) -> None:
        self._minimum = minimum
        self._with_lines = lines
        self._births = TensorBirths()
        self._fixtures: dict[int, Any] = {}  # those of a scope above `function` that have a value, by id
        self._ended: dict[int, str] = {}  # labels of those that have ended since the last judgement
        self._raised = False  # the present test: its error keeps what its frames hold, and is the test's own failure
        self._peak: CpuPeak | CudaPeak | None = None
        self._lines: Any = None  # the mode that notes the lines of allocations
        self._problem = ""

    # --- hooks of pytest

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse marks that cannot be used, before any test runs."""
        for item in items:
            allowance_of(item)

    def pytest_runtestloop(self) -> None:
        """Begin after the import of the tests. Their globals may stay."""
        self._try(self._find_device)  # before old storages are read: those of another kind of device are left out
        self._try(self._births.start)

    def pytest_unconfigure(self) -> None:
        """End."""
        self._births.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begin a test."""
        self._raised, self._peak, self._lines = False, None, None
        self._try(self._begin, item)
        with self._measured():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Measure the test itself."""
        if self._births.tracked == "":
            self._try(self._find_device)
        with self._measured():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Note the tensors that a fixture of a wider scope makes as its own."""
        if fixturedef.scope == "function":
            return (yield)
        self._try(self._births.note)
        former, self._births.owner = self._births.owner, id(fixturedef)
        try:
            return (yield)
        finally:
            self._try(self._births.note)
            self._births.owner = former
            self._fixtures[id(fixturedef)] = fixturedef

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """Note the end of a fixture. The memory that it made is judged after the present teardown."""
        if self._fixtures.pop(id(fixturedef), None) is not None:
            self._ended[id(fixturedef)] = label_of(fixturedef)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge the test when all of its teardown is over and reported."""
        report = yield
        self._raised = self._raised or call.excinfo is not None
        if call.when == "teardown":
            self._try(self._end, item, report)
            if self._problem:
                setattr(report, PROBLEM, self._problem)
        return report

    def _try(self, function: Any, *args: Any) -> None:
        """Call a function of ours; at its first error, end the watch."""
        if self._problem:
            return
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - no failure of ours reaches a test
            self._problem = f"the watch over leaks ended early ({in_one_line(error)} in {line_of(error)}): please report it"

    @contextmanager
    def _measured(self) -> Iterator[None]:
        peak = nullcontext() if self._peak is None else self._peak.phase()
        with self._lines or nullcontext(), peak:
            yield

    # --- a test

    def _find_device(self) -> None:
        if "torch" in sys.modules and hasattr(sys.modules["torch"], "cuda"):
            self._births.tracked = tracked_device()

    def _begin(self, item: pytest.Item) -> None:
        if not self._births.tracked:
            self._find_device()
        self._births.note()
        self._births.settle(TEST)  # made between tests, by nobody
        allowance = allowance_of(item)
        if allowance.peak is not None and self._births.tracked:
            self._peak = peak_of(self._births.tracked, allowance.peak)
        if self._with_lines and self._births.tracked:
            from nbguard.memory.scan.storage_events import AllocationLines

            self._lines = AllocationLines()

    def _end(self, item: pytest.Item, report: pytest.TestReport) -> None:
        if not self._births.tracked:
            self._find_device()
        if not self._births.tracked:
            return
        setattr(report, DEVICE, self._births.tracked)
        self._births.note()
        allowance = allowance_of(item)
        self._births.left(TEST)  # also of a test that raised: the next one is not blamed for its gradients
        memory = None if self._raised else self._memory_of(item, allowance)
        self._births.settle(TEST)
        for key in self._ended:
            self._births.settle(key)
        self._ended = {}
        setattr(report, JUDGED, memory is not None)
        if memory is None or not memory.is_worth_telling:
            return
        setattr(report, MEMORY, to_plain(memory))
        report.user_properties += _properties(memory)
        if memory.is_failed and report.outcome == "passed":
            report.outcome = "failed"
            report.longrepr = _shown(item, memory)

    def _memory_of(self, item: pytest.Item, allowance: MemoryAllowance) -> MemoryOfTest:
        least = max(self._minimum, allowance.keeps or 0)
        owners = {TEST: "", **self._ended}
        left = {owner: nbytes for owner in owners if (nbytes := self._births.left(owner))}
        collected, leaks, kept = 0, list[HeldMemory](), 0
        if any(sum(nbytes.values()) >= least for nbytes in left.values()):
            _drop_arguments(item)
            collected = self._collect(owners, least)
            left = {owner: nbytes for owner in owners if sum((nbytes := self._births.left(owner)).values()) >= least}
            if left:
                leaks, kept = self._leaks(item, {owners[owner]: nbytes for owner, nbytes in left.items()}, least)
        file, line, _ = item.location
        return MemoryOfTest(
            test=item.nodeid,
            file=Path(file).as_posix(),
            line=(line or 0) + 1,
            leaks=tuple(leaks),
            collected=collected,
            peak=None if self._peak is None else self._peak.peak,
            limit=allowance.peak,
            kept_by_pytest=kept,
        )

    def _collect(self, owners: dict[int, str], least: int) -> int:
        """Collect garbage, the young first, as that is most often enough; return the bytes that were freed, if that many."""
        before = after = sum(sum(self._births.left(owner).values()) for owner in owners)
        for generation in (1, 2):
            if after < least:
                break
            gc.collect(generation)
            after = sum(sum(self._births.left(owner).values()) for owner in owners)
        return before - after if before - after >= least else 0

    def _leaks(self, item: pytest.Item, left: dict[str, dict[StorageKey, int]], least: int) -> tuple[list[HeldMemory], int]:
        """Return the leaks of owners, by their labels, and the bytes on the instance of the test's class."""
        from nbguard.frontend.gpu_leaks.verdict import allocation_sites, judge, user_files
        from nbguard.memory.scan.scan import Notebook, scan

        labels = dict[str, int]()
        for key, fixture in self._fixtures.items():
            label = label_of(fixture)
            labels[label if label not in labels else f"{label}, number {len(labels)}"] = key
        living = {label: _kept_by(self._fixtures[key]) for label, key in labels.items()}
        instance = getattr(item, "_instance", None)
        namespace = living | ({} if instance is None else {_INSTANCE: instance})
        notebook = replace(Notebook.current(namespace), in_use=namespace.keys())  # or all of pytest would be walked
        analysis = scan(notebook, tracked=self._births.tracked).analysis
        del notebook, living, namespace, instance  # they are the user's
        files = user_files(item.config.rootpath)
        lines = allocation_sites(analysis.facts) if self._lines is None else self._lines.lines
        found, kept = list[HeldMemory](), 0
        for owner, nbytes in left.items():
            verdict = judge(analysis, nbytes, (*labels, _INSTANCE), files, lines, owner)
            for label, keys in verdict.excused.items():
                if label == _INSTANCE:
                    kept += sum(map(nbytes.__getitem__, keys))
                else:
                    self._births.hand_over(keys, labels[label])
            if sum(leak.nbytes for leak in verdict.leaks) >= least:
                found += verdict.leaks
        return found, kept


def label_of(fixture: Any) -> str:
    """Return the name of a fixture with its scope: `module fixture net`; of `setup_class` and its like, whose it is."""
    name = fixture.argname
    return f"{fixture.scope} fixture {name}" if not name.startswith("_") else f"{fixture.scope} fixture {name.strip('_')}"


def _kept_by(fixture: Any) -> tuple[Any, ...]:
    """Return the value of a fixture, and the generator that waits for its end, with its variables."""
    cached = fixture.cached_result
    finalizers = [each for each in fixture._finalizers if type(each) is functools.partial]
    generators = [each for finalizer in finalizers for each in finalizer.args if type(each) is types.GeneratorType]
    return (*(() if cached is None else cached[:1]), *generators)


def _drop_arguments(item: pytest.Item) -> None:
    """Let go of the values of the test's own fixtures, as pytest does a moment later."""
    arguments = getattr(item, "funcargs", None)
    if type(arguments) is dict:
        arguments.clear()


def _properties(memory: MemoryOfTest) -> list[tuple[str, object]]:
    """Return the properties of a test in JUnit's XML."""
    found: list[tuple[str, object]] = []
    if memory.leaks:
        found.append(("gpu_leaks_bytes", memory.nbytes))
        found += [("gpu_leak", leak.sentence) for leak in memory.leaks]
    if memory.peak is not None:
        found.append(("gpu_memory_peak_bytes", memory.peak))
    return found


def _shown(item: pytest.Item, memory: MemoryOfTest) -> ReprExceptionInfo:
    """Return the failure as pytest shows one; in this form xdist hands it on."""
    entry = ReprEntryNative([f"{line}\n" for line in memory.lines])
    place = ReprFileLocation(str(item.path), memory.line, memory.lines[0])
    return ReprExceptionInfo(ReprTraceback([entry], None, "native"), place)
