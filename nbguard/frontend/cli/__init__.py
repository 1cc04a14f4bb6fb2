"""The command line: `nbguard COMMAND`, the same as `python -m nbguard COMMAND`. Commands on files need no PyTorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nbguard.errors import NbguardError
from nbguard.frontend.cli.arguments import TERMINAL
from nbguard.frontend.cli.terminal import complain, say
from nbguard.frontend.grammar import LineError

__all__ = ["TERMINAL", "main"]

_BROKEN_PIPE = 128 + 13
"""The exit status that a shell gives to a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    0 is success. 1 is an answer that calls for something: a replay that is not exact, a fit that may not fit, a run that is
    recorded as out of memory, no GPU; of `doctor --strict`, a piece of advice. 2 is a file or an option that cannot be used.
    3 is a problem that `doctor --strict` has found. 130 is an interrupt. 141 is a reader that went before the end, as `head`
    does; nothing is said then. A script that `run` runs ends the process as it does without it.
    """
    _open_closed_streams()
    done = _guarded(arguments)
    return done if isinstance(done, int) else done()


def _guarded(arguments: Sequence[str] | None) -> int | Callable[[], int]:
    """Run a command and return its exit status; of a script, return the function that runs it, to be called by itself."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        return _BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:  # of a file, not of the output
            raise
        with suppress(OSError):
            say(f"the output cannot be written: {error.strerror}")
        _write_no_more()
        return 2


def _open_closed_streams() -> None:
    """Let streams that the shell closed lead nowhere. The next file to be opened would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the process ends


def _write_no_more() -> None:
    """Send the rest of the output nowhere, as Python tries once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: Sequence[str] | None) -> int | Callable[[], int]:
    """Run a command; say in one line why it cannot be run."""
    try:
        options = TERMINAL.read(sys.argv[1:] if arguments is None else arguments)
        done: int | Callable[[], int] = options.run(options)
        return done
    except LineError as error:
        complain(error)
        return 2
    except NbguardError as error:
        say(error.said("terminal"))
        return 2
    except MemoryError:
        say("there is not enough memory for it")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
