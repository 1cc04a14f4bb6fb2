"""The notices of a session, each with weak references that tell later whether it still holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.reports.notices.causes import diagnose_again
from nbguard.memory.reports.notices.notice import Departure, Notice, StorageKey, is_part_of, known_again
from nbguard.memory.reports.notices.rounds import is_still_held

_KEPT = 200
"""Notices that are remembered. The oldest are forgotten."""
_MOST_ASKED = 50
"""The latest notices that are checked again for whether they still hold."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """A notice, its storages weakly, and the departures of the names that it is about."""

    notice: Notice
    weak: Mapping[StorageKey, Any]  # torch's weak reference to each storage
    departures: tuple[Departure, ...] = ()  # none of a growth, an error or a result

    def alive(self) -> frozenset[StorageKey]:
        """Return the storages that the notice is about and that have not been freed."""
        return frozenset(key for key, weak in self.weak.items() if not weak.expired())


class ToldNotices:
    """The notices of a session by the events that they are about, the latest last."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], _Told] = {}

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Return the notices as they were told."""
        return tuple(told.notice for told in self._told.values())

    def has_told(self, notice: Notice) -> bool:
        """Say whether an earlier notice has told of the same memory and holders; then this one is counted there."""
        for fingerprint, told in reversed(list(self._told.items())):
            if is_part_of(notice, replace(told.notice, storages=told.alive())):
                self._told[fingerprint] = replace(told, notice=known_again(told.notice, notice.names))
                return True
        return False

    def tell(self, notice: Notice, weak: Iterable[tuple[StorageKey, Any]], departures: tuple[Departure, ...] = ()) -> bool:
        """Keep a notice; return whether it is the first on its event. The growth of one cell goes on for many of its runs."""
        former = self._told.pop(notice.fingerprint, None)
        if former is not None:
            notice = replace(known_again(former.notice, notice.names), **_words_of(notice))
        kept = {key: ref for key, ref in weak if key in notice.storages and ref is not None}
        self._told[notice.fingerprint] = _Told(notice=notice, weak=kept, departures=departures)
        while len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        return former is None

    @property
    def may_have_changed(self) -> bool:
        """Say whether it takes a scan to know which notices still hold."""
        return any(told.alive() for told in self._latest())

    def as_of(self, analysis: Analysis | None, least: int, views: Mapping[str, int]) -> Iterator[tuple[Notice, bool]]:
        """Yield each notice as it holds now, the earliest first, and whether it is about names that are gone.

        `analysis` is of a scan made now, or None where all of its storages are gone.
        """
        latest = set(map(id, self._latest()))
        for told in list(self._told.values()):
            now = None if analysis is None or id(told) not in latest else _as_of(told, analysis, least, views)
            yield (replace(told.notice, is_left=False) if now is None else now), bool(told.departures)

    def _latest(self) -> list[_Told]:
        return list(self._told.values())[-_MOST_ASKED:]


def _as_of(told: _Told, analysis: Analysis, least: int, views: Mapping[str, int]) -> Notice | None:
    """Return a notice as it would be told now; None if it no longer holds."""
    alive = told.alive()
    if not alive:
        return None
    if not told.departures:
        return told.notice if is_still_held(analysis, told.notice, alive) else None
    nbytes = 0 if told.notice.roots else told.notice.nbytes  # of memory that no scan met
    departures = [replace(gone, storages=gone.storages & alive, nbytes=nbytes) for gone in told.departures]
    now = diagnose_again(analysis, [gone for gone in departures if gone.storages], least, views)
    return None if now is None else replace(told.notice, **_words_of(now))


def _words_of(notice: Notice) -> dict[str, Any]:
    """Return the words of a notice on the memory now, without its event and its count."""
    words = ("nbytes", "holders", "holder_kind", "holder_cell", "advice", "frees", "is_whole", "keeps_graph", "view_nbytes")
    return {name: getattr(notice, name) for name in (*words, "storages", "roots")}
