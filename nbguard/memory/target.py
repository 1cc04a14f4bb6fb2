"""A target of a cleanup: a name or expression that the user asked to free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the user asked to free, in the words given, as far as it could be looked up without running user code.

    `root` is the label of a root (a plain name, `Out[3]`); else `containers` and `value` are ids of the objects whose
    reference `del` would remove. Without either (a computed key, say) the bytes cannot be promised, only measured.
    """

    text: str
    root: str = ""
    containers: tuple[int, ...] = ()
    value: int = 0
    value_kind: str = ""

    @property
    def is_known(self) -> bool:
        """Return whether the references that go are known beforehand."""
        return bool(self.root or (self.containers and self.value))
