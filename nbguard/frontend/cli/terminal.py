"""The command line's output, with results on standard output, and lines about errors, files and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbguard.memory.scan.progress import reported
from nbguard.texts import Host, printable
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.render.html import Block
    from nbguard.render.result import Result

# --- Progress in a terminal, as one line that goes with the end of the work.


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


def show(text: str, end: str = "\n") -> None:
    """Print a text without characters that would steer the terminal."""
    print(printable(text, "\n\t"), end=end, flush=True)


def show_json(data: Any) -> None:
    """Print data as JSON on one line."""
    show(json.dumps(data))


def show_blocks(blocks: Iterable[Block], end: str = "\n", where: Host = "notebook") -> None:
    """Print blocks as text."""
    from nbguard.render.text import blocks_text

    show(blocks_text(blocks, where), end)


def show_result(result: Result, *, as_json: bool, **details: int) -> None:
    """Print a result as text, or as JSON on one line; `details` are those of its view."""
    if as_json:
        show_json(result.to_data())
    else:
        show_blocks(result.blocks(**details))


def complain(error: Exception) -> None:
    """Print a complaint that names its command itself."""
    print(printable(str(error)), file=sys.stderr, flush=True)


def say(sentence: object) -> None:
    """Print a line about what went wrong, or was written."""
    print(printable(f"nbguard: {sentence}"), file=sys.stderr, flush=True)
