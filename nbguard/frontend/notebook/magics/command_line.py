"""The words of a magic's line, calls on its behalf, and its result, shown once."""

from __future__ import annotations

import argparse
import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from IPython.core.error import UsageError

from nbguard.errors import NbguardError, line_of
from nbguard.render.result import Result
from nbguard.texts import printable

_CLOSING = {"[": "]", "(": ")", "{": "}"}

Returned = TypeVar("Returned")
Shown = TypeVar("Shown", bound=Result)


def split(line: str) -> list[str]:
    """Return the words of a line: apart at blanks outside quotes and brackets, so that `runs["my run"] learn` is two words.

    Quotes and brackets stay as typed. A word that begins with `#`, outside of these, begins a comment, which ends the line.
    IPython's own splitter is the shell's: it would take the quotes of a key away, or split inside it.

    Raises:
        UsageError: a quote or bracket is not closed.
    """
    words, word, expected = [], "", ""
    for char in line:
        if expected and char == expected[-1]:
            expected = expected[:-1]
        elif expected[-1:] in ("'", '"'):
            pass
        elif char in _CLOSING:
            expected += _CLOSING[char]
        elif char in "'\"":
            expected += char
        elif not expected and char == "#" and not word:
            break
        elif not expected and (char.isspace() or char == ","):
            words.append(word)
            word = ""
            continue
        word += char
    if expected:
        raise UsageError(f"{line.strip()}: {expected[-1]} is missing")
    return [text for text in (*words, word) if text]


def asks_for_help(texts: Sequence[str]) -> bool:
    """Say whether a line asks for the options: `--help`, `-h`, or a `?` apart."""
    return any(text in ("--help", "-h", "?", "??") for text in texts)


_UP_TO_THE_CELL = 3
"""Frames from `with_names_expanded` up to the cell: itself, the magic, IPython's `run_line_magic`."""


def with_names_expanded(shell: Any, line: str) -> str:
    """Return a magic's line with its `{name}` and `$name` replaced, as IPython does it for magics that leave it to IPython."""
    expanded: str = shell.var_expand(line, _UP_TO_THE_CELL)
    return expanded


def guarded(name: str, call: Callable[..., Returned], *args: Any, **kw: Any) -> Returned:
    """Call the API; an error becomes one line for the user, without a traceback of ours.

    The new error is raised when the old one is gone, not while it is handled: as its context, the old one's frames, which
    hold the user's objects, would become part of IPython's last error. That goes for an interrupt and our own mistakes too.
    """
    interrupted = False
    try:
        with showing_progress():
            return call(*args, **kw)
    except NbguardError as error:
        message = str(error)
    except KeyboardInterrupt:
        interrupted, message = True, f"{name} was interrupted during its scan; nothing was changed"
    except ModuleNotFoundError as error:
        message = _missing(error)
    except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user more than a line
        message = _mistake(error)
    if interrupted:
        raise KeyboardInterrupt(message)
    raise UsageError(printable(f"{name}: {message}"))


def _mistake(error: Exception) -> str:
    return f"a mistake in nbguard ({type(error).__name__}: {error} at {line_of(error)}): please report it"


def _missing(error: ModuleNotFoundError) -> str:
    """Return the sentence on a module that is not there. Two packages may be missing, the second one in a browser only."""
    return f"{error.name} is not installed here, and this needs it" if error.name in ("torch", "psutil") else _mistake(error)


@contextmanager
def showing_progress() -> Iterator[None]:
    """Show a stage that takes longer than a second in one line under the cell; the line goes with its end."""
    from nbguard.frontend.notebook.display import ProgressLine
    from nbguard.memory.scan.progress import reported

    line = ProgressLine()
    with reported(line.say):
        try:
            yield
        finally:
            line.end()


def show(
    shell: Any, options: argparse.Namespace, result: Shown, widget: dict[str, Any] | None = None, **details: int | None
) -> Shown | None:
    """Display a result once, as text and HTML (or JSON), and keep the object where `-o` or an assignment says.

    `widget` is the mimebundle of a widget that shows more of the result where widgets are.
    Returns the result only if the line assigns it (`plan = %reset_gpu --dry-run`): else it would be displayed a second time
    and stay in `Out`.
    """
    from nbguard.frontend.notebook.display import display_bundle

    keep(shell, options, result)
    bundle = result.json_bundle() if options.json else result.mimebundle(**details)
    display_bundle({**(widget or {}), **bundle}, result.display_metadata())
    return result if _is_assigned() else None


def keep(shell: Any, options: argparse.Namespace, result: object) -> None:
    """Keep the result where `-o` says, if it does."""
    if options.output:
        shell.user_ns[options.output] = result


def _is_assigned() -> bool:
    """Say whether the cell assigns the magic's result, that is, whether a STORE follows the call in the cell's code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "run_line_magic":
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return False
    cell = frame.f_back
    following = (
        step.opname for step in dis.get_instructions(cell.f_code) if step.offset > cell.f_lasti and step.opname != "CACHE"
    )
    return next(following, "").startswith("STORE_")
