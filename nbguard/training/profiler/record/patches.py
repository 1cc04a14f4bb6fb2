"""Attributes replaced for the time of a profile, and put back as they were found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Put:
    owner: Any
    name: str
    before: Any  # the owner's own attribute, _ABSENT if it was inherited
    after: Any


class Patches:
    """Replaces attributes of classes and modules; `restore` puts the very same objects back, the last replaced first.

    An attribute that somebody else has replaced meanwhile stays theirs: ours, which they call, then only passes the call on.
    """

    def __init__(self) -> None:
        self._puts: list[_Put] = []

    @property
    def are_in(self) -> bool:
        """Say whether anything is replaced."""
        return bool(self._puts)

    def put(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Replace `owner.name` by `around(owner.name)`; return False where the owner has no such function."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        after = wraps(original)(around(original))
        self._puts.append(_Put(owner, name, vars(owner).get(name, _ABSENT), after))
        setattr(owner, name, after)
        return True

    def restore(self) -> None:
        """Put everything back."""
        while self._puts:
            put = self._puts.pop()
            if vars(put.owner).get(put.name) is not put.after:
                continue
            if put.before is _ABSENT:
                delattr(put.owner, put.name)
            else:
                setattr(put.owner, put.name, put.before)
