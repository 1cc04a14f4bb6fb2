"""The counters at the beginning and at the end of a cell, read once for all listeners that ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbguard.memory.core.counters import Reading
    from nbguard.memory.scan.devices.counters import Counters


class CellCounters:
    """Reads the counters when the first listener asks for them, and hands the same reading to the others.

    malloc may need a millisecond for its answer, and a listener that looks at the heap changes it for those after it.
    """

    def __init__(self) -> None:
        self._counters: Counters | None = None  # made when the first listener asks
        self._reading: Reading | None = None
        self._is_read = False

    def forget(self) -> None:
        """Forget the reading: a cell begins or ends."""
        self._is_read = False

    def read(self) -> Reading | None:
        """Return the counters of this end of the cell; None where there are none (`Counters.read`)."""
        if not self._is_read:
            self._reading, self._is_read = self.read_now(), True
        return self._reading

    def read_now(self) -> Reading | None:
        """Return the counters as they are now, for who has changed them since by looking."""
        if self._counters is None:
            from nbguard.memory.scan.devices.counters import Counters

            self._counters = Counters()
        return self._counters.read()
