"""Calls whose warnings are not shown, without a trace: Python still knows which warnings of others it has shown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def unwarned(category: type[Warning] = Warning) -> Iterator[None]:
    """Show no warnings of a category meanwhile.

    `warnings.catch_warnings` makes Python forget what it has shown once: the user's cells would show it again.
    """
    filters: Any = warnings.filters
    ignored = ("ignore", None, category, None, 0)
    filters.insert(0, ignored)
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has set other filters meanwhile
            filters.remove(ignored)
