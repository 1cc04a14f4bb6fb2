"""Lifetimes of a memory state's rows and notices: weak references say without a scan which rows and notices are over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbguard.frontend.sidebar.protocol.memory_state import key_of_notice
from nbguard.frontend.sidebar.protocol.rows import Rows
from nbguard.frontend.sidebar.protocol.state import MemoryState
from nbguard.memory.reports.notices.notice import Notice, StorageKey
from nbguard.memory.scan.scan import Scan

Key = int | str
"""The number of a row, or the key of a notice."""


class Lifetimes:
    """Weak references to the memory of one memory state's rows and notices.

    Each reference is asked until it has expired once, so that an answer usually takes one check per row.
    """

    def __init__(self, left: Mapping[Key, Iterable[Any]]) -> None:
        """`left` are torch's weak references to the storages of each row or notice, None for a storage without one."""
        known = ((key, list(refs)) for key, refs in left.items())
        self._left = {key: refs for key, refs in known if refs and all(ref is not None for ref in refs)}

    @classmethod
    def of(cls, scan: Scan, rows: Rows, notices: Iterable[Notice]) -> Lifetimes:
        """Return the lifetimes of the rows of a scan, and of notices that hold by it."""
        weak = scan.tracker.storages
        left: dict[Key, Iterable[Any]] = {
            number: [weak[storage] for storage in storages] for number, storages in enumerate(rows.storages)
        }
        by_key: dict[StorageKey, Any] = {fact.key: ref for fact, ref in zip(scan.facts.graph.storages, weak, strict=True)}
        left |= {key_of_notice(one): [by_key[key] for key in one.storages if key in by_key] for one in notices}
        return cls(left)

    def over(self) -> frozenset[Key]:
        """Return the rows and notices whose memory has all been freed since the scan."""
        return frozenset(self._over())

    def _over(self) -> Iterator[Key]:
        for key, refs in self._left.items():
            while refs and refs[-1].expired():
                refs.pop()
            if not refs:
                yield key


def without(state: MemoryState, over: Collection[Key]) -> MemoryState:
    """Return a memory state without expired parts: rows with stale bytes and Learners, notices, findings, the card."""
    freed = sum(row.stale_bytes for row in state.holders if row.id in over)
    return replace(
        state,
        stale=max(0, state.stale - freed),
        holders=tuple(row for row in state.holders if row.id not in over),
        experiments=tuple(one for one in state.experiments if one.id not in over),
        findings=tuple(one for one in state.findings if one.key not in over),
        notices=tuple(one for one in state.notices if one.key not in over),
        oom=None if state.oom is None or state.oom.key in over else state.oom,
    )
