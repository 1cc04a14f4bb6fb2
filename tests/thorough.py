"""How much runs of what asks the same question many times: a spread of it, or with NBGUARD_THOROUGH=1 all of it.

`make test`, as CI, sets NBGUARD_SPREAD: of alike cases and of random examples each second (`left_out_by_ci`, `half_in_ci`,
`examples`), and of the tests that are marked slow a third, by its number, which CI takes from the day. `make test-all` has all.
`make unit`, which is to take less than a minute, sets NBGUARD_QUICK=1: a third of the random examples (`examples`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")

THOROUGH = os.environ.get("NBGUARD_THOROUGH", "0") != "0"

_TURN = 0 if THOROUGH else int(os.environ.get("NBGUARD_SPREAD") or 0)
_SPREAD = _TURN > 0
_TURNS = 3

left_out_by_ci = pytest.mark.skipif(_SPREAD, reason="NBGUARD_SPREAD leaves it out")

_QUICK = os.environ.get("NBGUARD_QUICK", "0") != "0" and not THOROUGH


def waits_for_its_turn(item: pytest.Item) -> bool:
    """Say whether CI runs a slow test on another day. Those marked daily run each day."""
    if not _SPREAD or item.get_closest_marker("slow") is None or item.get_closest_marker("daily") is not None:
        return False
    return crc32(item.nodeid.encode()) % _TURNS != _TURN % _TURNS


def examples(count: int) -> int:
    """Return how many examples of a property test are tried: `count`, in CI half, when quick a third, thoroughly 50 times."""
    if THOROUGH:
        return count * 50
    return max(count // (3 if _QUICK else 2 if _SPREAD else 1), 1)


def fewer_in_ci(count: int) -> int:
    """Return as many as `examples`: in CI half of them."""
    return examples(count)


def half_in_ci(cases: Iterable[T]) -> Sequence[T]:
    """Return the cases; in CI every second one."""
    return list(cases)[:: 2 if _SPREAD else 1]


def spread(cases: Sequence[T], every: int) -> Sequence[T]:
    """Return each `every`-th of the cases, from the first on; all of them in a thorough run."""
    return cases if THOROUGH else cases[::every]
