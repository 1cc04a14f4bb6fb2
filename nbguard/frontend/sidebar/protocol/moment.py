"""A moment of the allocator's recorded history, for a sidebar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbguard.frontend.sidebar.protocol.memory_state import strips
from nbguard.frontend.sidebar.protocol.state import HeldThen, MomentView
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.allocator.model.settings import DEFAULT_POOL
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.snapshots.moment import RecordedHistory
from nbguard.memory.snapshots.moment_view import event_words, peak_words

_HOLDERS = 8
_STRIPS = 16
"""Segments that are drawn alone."""


def moment_view(history: RecordedHistory, device: int | None, event: int | None) -> MomentView:
    """Return a device after an event; None stands for the first device that has a history, and for its peak.

    An event after the last one is the last one.

    Raises:
        SnapshotError: the history has no events, or not of this device; or a trace contradicts its end.
    """
    number = history.devices[0] if device is None and history.devices else device
    if event is not None and number in history.devices:
        event = min(event, history.of(number).events)
    moment = history.at("peak" if event is None else event, number)
    (then,), (report,) = moment.devices, moment.report.report.devices
    number = int(then.device.removeprefix("cuda:"))
    segments = history.segments(number, then.event)
    private = {segment.pool for segment in segments} - {DEFAULT_POOL}
    sentences = (event_words(then), peak_words(then, report.holders), *moment.report.notes)
    return MomentView(
        device=number,
        devices=history.devices,
        event=then.event,
        events=then.events,
        peak=then.peak_event,
        refused=history.of(number).refused,
        sentences=tuple(map(truncate_utf8, sentences)),
        course=tuple(point.allocated for point in then.course),
        segments=len(segments),
        strips=strips(segments, private, _STRIPS),
        holders=tuple(_holders(report.holders)),
    )


def _holders(rows: Sequence[Holder]) -> Iterator[HeldThen]:
    for row in rows[:_HOLDERS]:
        yield HeldThen(truncate_utf8(row.label), row.retained)
    if more := rows[_HOLDERS:]:
        yield HeldThen(f"{len(more)} more", sum(row.retained for row in more))
