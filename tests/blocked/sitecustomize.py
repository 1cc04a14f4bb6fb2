"""Python imports this at its start in each process that `make unit` starts: it refuses packages there, too."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing`, too, would be imported in each of these processes
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

BLOCKED = "NBGUARD_TESTS_BLOCKED"
"""The variable with the names of the packages, parted by commas."""


class Blocker:
    """A finder of modules that refuses the blocked packages, as an environment without them would."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}: `make unit` runs without it", name=name)


if BLOCKED in os.environ:
    sys.meta_path.insert(0, Blocker(os.environ[BLOCKED].split(",")))  # type: ignore[arg-type]
