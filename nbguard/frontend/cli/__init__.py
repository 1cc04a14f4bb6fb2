"""The command line: `nbguard COMMAND`, the same as `python -m nbguard COMMAND`. Commands on files need no PyTorch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nbguard.errors import NbguardError
from nbguard.frontend.cli.arguments import command_parser, commands_of
from nbguard.frontend.cli.terminal import say
from nbguard.spelling import did_you_mean, unknown_arguments

__all__ = ["command_parser", "main"]


_BROKEN_PIPE = 128 + 13
"""The exit status that a shell gives to a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    0 is success. 1 is an answer that calls for something: a replay that is not exact, a fit that may not fit, a run that is
    recorded as out of memory, no GPU; of `doctor --strict`, a piece of advice. 2 is a file or an option that cannot be used.
    3 is a problem that `doctor --strict` has found. 130 is an interrupt. 141 is a reader that went before the end, as `head`
    does; nothing is said then.
    """
    _open_closed_streams()
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


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command; say in one line why it cannot be run."""
    options = _parsed(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(options.run(options))
    except NbguardError as error:
        say(error)
        return 2
    except MemoryError:
        say("there is not enough memory for it")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a command; words after `--` in `predict` are the script's."""
    parser, of_script = command_parser(), list[str]()
    known = commands_of(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        question = did_you_mean(arguments[0], known)
        parser.error(f"there is no command {arguments[0]}" + (f": {question}" if question else ""))
    is_prediction = arguments[:1] == ["predict"]
    if is_prediction and "--" in arguments:
        place = arguments.index("--")
        arguments, of_script = arguments[:place], arguments[place + 1 :]
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = "; write the script's own after --" if is_prediction else ""
        command = known[options.command]
        command.error(f"{unknown_arguments(unknown, command._option_string_actions)}{hint}")
    options.arguments = of_script
    return options
