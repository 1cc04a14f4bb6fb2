"""A target of a cleanup, which is a name or expression that the user asked to free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A name or expression that the user asked to free, as far as it could be looked up without running user code.

    Without `root` and without `containers` (a computed key, say) the bytes cannot be promised, only measured.
    """

    text: str  # as the user wrote it
    root: str = ""  # label of the root that goes: a plain name, `Out[3]`
    containers: tuple[int, ...] = ()  # else ids of the objects whose reference `del` would remove
    value: int = 0  # id of the object that they refer to
    value_kind: str = ""  # that object in a few words
    step: str = field(default="", metadata={"json": False})
    """How the reference that goes is written, of a path that only a report knows; empty where `del` takes it away."""
    line: str = field(default="", metadata={"json": False})  # code that ends a library's hold on its root instead
    lets_go: bool = field(
        default=False, metadata={"json": False}
    )  # its root, such as the last error, lets go of it by itself: there is nothing to delete
    turn: tuple[int, int] = field(default=(0, 0), compare=False, metadata={"json": False})
    """Order of deletion, the least first: parts before their wholes, and the last element of a list first."""

    @property
    def is_known(self) -> bool:
        """Return whether the references that go are known beforehand."""
        return bool(self.root or self.lets_go or (self.containers and self.value))
