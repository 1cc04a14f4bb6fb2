"""Ctrl-C during a cleanup, which stops the current step, while the steps done are still measured and reported.

Where something of ours is put up or taken down, it waits until that is done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt only inside `allowed()`; elsewhere it is noted in `happened`.

    Only the main thread gets signals: in any other this changes nothing. The handler that was there comes back at the end.
    """

    def __init__(self) -> None:
        self.happened: bool = False
        self._allowed = False
        self._former: Any = None
        self._installed = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._former if self._former is not None else signal.SIG_DFL)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.happened = True
        if self._allowed:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let SIGINT raise KeyboardInterrupt inside the block."""
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False


@contextmanager
def postponed() -> Iterator[None]:
    """Let SIGINT wait for the end of the block, and send it then to the handler that was there."""
    interrupts = Interrupts()
    try:
        with interrupts:
            yield
    finally:
        if interrupts.happened:
            signal.raise_signal(signal.SIGINT)
