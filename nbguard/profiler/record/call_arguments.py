"""The arguments of a call, where some are given by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CallArguments(tuple[Any, ...]):
    """All arguments of a call in a row, as if positional; the last ones were given by `names`."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], named: Mapping[str, Any]) -> CallArguments:
        """Return the values of a call, positional ones first."""
        arguments = cls((*args, *named.values()))
        arguments.names = tuple(named)
        return arguments
