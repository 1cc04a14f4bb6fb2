"""Progress in a terminal, as one line that goes with the end of the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbguard.memory.scan.progress import reported
from nbguard.units import format_bytes


def progress(what: str, least: int = 1) -> Callable[[int, int], None] | None:
    """Return a function that shows (done, total), for totals of at least `least`, or None where stderr is no terminal.

    Args:
        what: `runs` counts them, anything else is of bytes.
        least: smallest total that is shown.
    """
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total < least:
            return
        amounts = (done, total) if what == "runs" else (format_bytes(done), format_bytes(total))
        text = f"{what} {amounts[0]} of {amounts[1]}" if done < total else ""
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)

    return show


@contextmanager
def shown_stages() -> Iterator[None]:
    """Show a stage that takes longer than a second in a terminal; the line goes with its end."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        with reported(lambda words: print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)):
            yield
    finally:
        print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
