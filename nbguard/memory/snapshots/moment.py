"""Moments of the recorded history of a snapshot file, with the holders at any event, and the place of the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from nbguard.errors import NbguardError, SnapshotError
from nbguard.memory.allocator.model.settings import DEFAULT_POOL
from nbguard.memory.allocator.replay.moments import TraceMoment, TraceMoments
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.core.facts import DeviceFacts, Segment
from nbguard.memory.reports.memory_map import MemoryMap
from nbguard.memory.snapshots.load import HolderNames, NotebookNames, Progress, device_facts, load_named, site_of
from nbguard.memory.snapshots.report import (
    UNKNOWN,
    SnapshotDiff,
    SnapshotReport,
    comparable,
    difference,
    notes_of,
    report_of,
    reported,
    saved_map,
)
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

At: TypeAlias = int | Literal["peak", "oom"]
"""A moment, as the number of events that had happened, the peak of allocated bytes, or the first request that was refused."""

_POINTS = 240
"""Points of a course, at most."""

_FORGOTTEN = "unknown, from before the history"


@dataclass(frozen=True, slots=True)
class CoursePoint:
    """The most bytes in a stretch of a history, up to an event."""

    event: int  # the last of the stretch
    allocated: int  # bytes of blocks in use
    reserved: int  # bytes of segments


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMoment:
    """One device after an event of its history. All sizes are bytes."""

    device: str  # name in torch: `cuda:0`
    event: int  # number of the event, from 1 on; 0 is the time before the first
    events: int  # in the history of this device
    action: str  # of the event, as PyTorch's trace calls it; empty for event 0
    nbytes: int  # that the event is about; 0 for event 0
    site: str  # line that requested them; empty where it is not recorded
    allocated: int  # bytes of blocks in use
    reserved: int  # bytes of segments
    peak: int  # most that was allocated in the history
    peak_event: int  # number of the first event after which so much was
    course: tuple[CoursePoint, ...]  # the whole history, in stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMoment(Result):
    """A moment of a recorded history, with the holders and the map of that time."""

    kind: ClassVar[str] = "moment"
    view: ClassVar[str] = "nbguard.memory.snapshots.moment_view:moment_blocks"

    file: str  # name of the snapshot file, without its folder
    devices: tuple[DeviceMoment, ...]  # those that have a history
    report: SnapshotReport  # the holders and pools then
    map: MemoryMap  # the segments and blocks then


class RecordedHistory:
    """The history of a snapshot file, to be looked at after any event.

    Args:
        path: that the snapshot was loaded from, or the name of the process that it was just taken of.
        snapshot: with its traces.
        names: from its sidecar, or of that process.
        is_live: it was taken of a process that goes on.
    """

    def __init__(self, path: str | Path, snapshot: Snapshot, names: NotebookNames, *, is_live: bool = False) -> None:
        self.path, self.names, self._is_live = path, names, is_live
        self.file = Path(path).name
        self.devices = tuple(number for number in snapshot.devices if snapshot.trace(number).events)
        self._snapshot = snapshot
        self._moments: dict[int, TraceMoments] = {}

    def segments(self, device: int, event: int) -> tuple[Segment, ...]:
        """Return the segments of a device after an event."""
        return device_facts(self.of(device).at(event).snapshot, device).segments or ()

    @classmethod
    def load(cls, path: str | Path, progress: Progress | None = None) -> RecordedHistory:
        """Return the history in a file.

        Raises:
            SnapshotError: the file, or the one beside it, cannot be read.
        """
        return cls(path, *load_named(path, progress))

    def named(self, names: NotebookNames) -> RecordedHistory:
        """Return the same history with other names of holders."""
        other = RecordedHistory(self.path, self._snapshot, names, is_live=self._is_live)
        other._moments = self._moments
        return other

    def of(self, device: int) -> TraceMoments:
        """Return the states of one device.

        Raises:
            SnapshotError: its trace contradicts the end.
        """
        if device not in self._moments:
            try:
                self._moments[device] = TraceMoments(self._snapshot, device)
            except SnapshotError as error:
                raise SnapshotError(f"{self.file}: cuda:{device} cannot be followed back, because {error}") from None
        return self._moments[device]

    def at(self, at: At, device: int | None = None) -> SnapshotMoment:
        """Return a moment.

        Args:
            at: a number of events, of one device; `"peak"` and `"oom"` are each device's own.
            device: only this one.

        Raises:
            SnapshotError: the history has no such moment, or no such device; or a trace contradicts its end.
        """
        moments = {number: self.of(number).at(event) for number, event in self._events(at, device).items()}
        facts = [self._facts(number, moment) for number, moment in moments.items()]
        notes = (*notes_of(self._snapshot, self.names), *self._notes(moments))
        events = tuple(moment.event for moment in moments.values())
        label = f"{self.file} at {_events_words(events)}"
        report = replace(reported(label, self._snapshot, facts, notes), events=events)
        return SnapshotMoment(
            file=self.file,
            devices=tuple(self._device(number, moment.event) for number, moment in moments.items()),
            report=report,
            map=saved_map(label, facts, ()),
        )

    def report(self, at: At | None, device: int | None = None) -> SnapshotReport:
        """Return the report on a moment, as `at` finds it; None stands for the end of the history, which is the file itself."""
        if at is not None:
            return self.at(at, device).report
        saved = report_of(self.path, self._snapshot, self.names)
        return saved if device is None else replace(saved, report=saved.report.only(str(device)))

    def _events(self, at: At, device: int | None) -> dict[int, int]:
        """Return the event of each device that is meant."""
        if not self.devices:
            if self._is_live:
                raise SnapshotError(f"{self.file}: nothing has happened in the history that is recorded; run the cells first")
            raise SnapshotError(
                f"{self.file}: it has no history, so no earlier moment is known. "
                "torch.cuda.memory._record_memory_history() before the run records one."
            )
        numbers = self.devices if device is None else tuple(number for number in self.devices if number == device)
        have = ", ".join(f"cuda:{number}" for number in self.devices)
        if not numbers:
            raise SnapshotError(f"{self.file}: cuda:{device} has no history; there is one of: {have}")
        if at == "peak":
            return {number: self.of(number).peak for number in numbers}
        if at == "oom":
            refused = {number: event for number in numbers if (event := self.of(number).refused) is not None}
            if not refused:
                raise SnapshotError(f"{self.file}: no request failed in its history; peak is the fullest moment")
            return refused
        if len(numbers) > 1:
            raise SnapshotError(f"{self.file}: its devices have a history each ({have}); choose one with --device")
        events = self.of(numbers[0]).events
        if not 0 <= at <= events:
            raise SnapshotError(f"{self.file}: the history of cuda:{numbers[0]} has the events 0 to {events}, and no {at}")
        return {numbers[0]: at}

    def _facts(self, number: int, moment: TraceMoment) -> tuple[DeviceFacts, HolderNames]:
        """Return a device then, and the names of its blocks' holders.

        A block that lasts to the end has its holder's name of the end. No other block gets one.
        """
        at_end = {} if self.names.holders is None else self.names.holders.get(number, {})
        names = {address: name for address, name in at_end.items() if address in moment.kept}
        for segment in moment.snapshot.segments:
            for block in segment.blocks:
                is_of_python = block.address in moment.kept and self.names.holders is not None
                if block.state != "inactive" and block.stack < 0 and segment.pool == DEFAULT_POOL and not is_of_python:
                    names[block.address] = _FORGOTTEN if block.address in moment.forgotten else UNKNOWN
        return device_facts(moment.snapshot, number), names

    def _device(self, number: int, event: int) -> DeviceMoment:
        states, trace = self.of(number), self._snapshot.trace(number)
        action, _, nbytes, _ = trace.events[event - 1] if event else ("", 0, 0, 0)
        stack = trace.stacks[event - 1] if event and trace.stacks else -1
        is_request = action in ("alloc", "oom")
        return DeviceMoment(
            device=f"cuda:{number}",
            event=event,
            events=states.events,
            action=action,
            nbytes=nbytes,
            site=site_of(self._snapshot.stacks[stack]) if stack >= 0 and is_request else "",
            allocated=states.allocated[event],
            reserved=states.reserved[event],
            peak=states.allocated[states.peak],
            peak_event=states.peak,
            course=tuple(_course(states)),
        )

    def _notes(self, moments: dict[int, TraceMoment]) -> Iterator[str]:
        """Yield sentences on facts that the history does not tell of these moments."""
        if self.names.holders and self._is_live:
            yield "a name is the present one, for a block that is still there"
        elif self.names.holders:
            yield "a name is the one of the time when the file was written, for a block that was still there"
        for number, moment in moments.items():
            states = self.of(number)
            sizes = {block.address: block.size for segment in moment.snapshot.segments for block in segment.blocks}
            if states.left_before:
                yield f"the history of cuda:{number} begins with {counted(states.left_before, 'block')} in use"
            if moment.forgotten:
                held = format_bytes(sum(sizes[address] for address in moment.forgotten))
                yield (
                    f"{counted(len(moment.forgotten), 'block')} ({held}) on cuda:{number} came before the history and went "
                    "during it, so that no line is recorded"
                )
            if moment.unsure:
                yield f"{counted(len(moment.unsure), 'block')} of them may be up to 1 MiB larger than shown"
            if not states.replay.is_exact:
                missed = states.replay.events - states.replay.reproduced
                yield (
                    f"{counted(missed, 'event')} of cuda:{number} are not as nbguard's model has them: after them, sizes of "
                    "blocks that were freed later may be off"
                )


def snapshot_moment(path: str | Path, at: At, device: int | None = None, progress: Progress | None = None) -> SnapshotMoment:
    """Return a moment of the history in a snapshot file, with the holders and the map of that time.

    Args:
        path: of the file.
        at: the number of events that had happened, `"peak"`, or `"oom"` for the first request that was refused.
        device: only this one; needed for a number where several devices have a history.
        progress: called while the file is read.

    Raises:
        SnapshotError: the file, or the one beside it, cannot be read; or it has no such moment.
    """
    return RecordedHistory.load(path, progress).at(at, device)


def moment_diff(
    before: RecordedHistory, after: RecordedHistory, at: tuple[At | None, At | None], device: int | None = None
) -> SnapshotDiff:
    """Return the bytes that came and went from one moment to another, by holder and by pool.

    Args:
        before: the history of the first moment.
        after: the history of the second moment, which may be the same one.
        at: both moments; None stands for the end of a history, which is the file itself.
        device: only this one.

    Raises:
        SnapshotError: one of the histories has no such moment.
    """
    first_names, second_names, notes = comparable((before.path, before.names), (after.path, after.names))
    first = before.named(first_names).report(at[0], device)
    second = after.named(second_names).report(at[1], device)
    if at != (None, None):
        notes += tuple(dict.fromkeys((*first.notes, *second.notes)))
    return difference(first, second, notes)


def diff_of_files(
    before: str, after: str | None, at: tuple[At | None, At | None], device: int | None = None, progress: Progress | None = None
) -> SnapshotDiff:
    """Return the growth between two files, or with `at` between moments of their histories, or of one file's.

    Raises:
        NbguardError: one file without moments; or as `moment_diff`.
        SnapshotError: a file cannot be read.
    """
    if after is None and at == (None, None):
        raise NbguardError("give two files, the earlier one first, or one with --at EVENT --and EVENT")
    first = RecordedHistory.load(before, progress)
    second = first if after is None else RecordedHistory.load(after, progress)
    return moment_diff(first, second, at, device)


def _events_words(events: tuple[int, ...]) -> str:
    return " and ".join(f"event {event:,}" for event in events)


def _course(states: TraceMoments) -> Iterator[CoursePoint]:
    step = -(-len(states.allocated) // _POINTS)
    for start in range(0, len(states.allocated), step):
        end = min(start + step, len(states.allocated))
        yield CoursePoint(end - 1, max(states.allocated[start:end]), max(states.reserved[start:end]))
