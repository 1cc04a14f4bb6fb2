"""The command line's output: results on standard output, a line about an error or a written file on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from nbguard.printable import printable
from nbguard.render.blocks import Block
from nbguard.render.result import Result
from nbguard.texts import Host


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


def say(sentence: object) -> None:
    """Print a line about what went wrong, or was written."""
    print(printable(f"nbguard: {sentence}"), file=sys.stderr, flush=True)
