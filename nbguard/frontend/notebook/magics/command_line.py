"""Reading a magic's line and showing its result."""

from __future__ import annotations

import argparse
import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from types import FrameType
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from nbguard.errors import NbguardError, line_of
from nbguard.render.result import Result
from nbguard.spelling import none_of, unknown_arguments
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


def parser(prog: str, description: str, *, as_json: bool = True) -> MagicArgumentParser:
    """Return a parser whose errors are one line; the options that every magic has are in it (`--json` if `as_json`)."""
    style = argparse.HelpFormatter
    options = MagicParser(prog=prog, description=description, formatter_class=style, add_help=False)
    add_common(options, as_json=as_json)
    return options


class MagicParser(MagicArgumentParser):
    """The parser of a magic or of one of its words. An argument that cannot be read is an `argparse.ArgumentError`."""

    def __init__(self, **options: Any) -> None:
        options.pop("color", None)  # of Python 3.14, which IPython's parser does not know
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self.exit_on_error = False

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(value, action.choices))


def is_of_option(error: Exception) -> bool:
    """Say whether a complaint of a parser is about an option, and not about a word that stands by its place."""
    return isinstance(error, argparse.ArgumentError) and str(error.argument_name).startswith("-")


def complaint_of(error: Exception) -> str:
    """Return the complaint of a parser; that about a word that stands by its place without its name, which nobody types."""
    return error.message if isinstance(error, argparse.ArgumentError) and not is_of_option(error) else str(error)


def add_common(options: MagicArgumentParser, *, as_json: bool = True) -> None:
    """Add the options that every magic has."""
    options.allow_abbrev = False  # a mistyped option must not become another one
    # Since Python 3.14 help is coloured by escape sequences otherwise: a kernel asks for them, whoever reads the text.
    options.color = False  # type: ignore[attr-defined]
    if as_json:
        options.add_argument("--json", action="store_true", help="the result as JSON, bytes as integers")
    options.add_argument(
        "-o", metavar="NAME", dest="output", type=_variable, help="also put the result object into the variable NAME"
    )


def _variable(name: str) -> str:
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name} is not the name of a variable: write it as in  -o report")
    return name


def with_options(options: Callable[[], MagicArgumentParser]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that shows a parser's options in the magic's help (`%reset_gpu?`).

    IPython asks a magic for its help by `getdoc()` where it has one: so the parser is built when somebody first asks.
    """

    def decorate(magic: Any) -> Any:
        magic.getdoc = lambda: f"{cleandoc(magic.__doc__ or '')}\n\n{options().format_help()}"
        return magic

    return decorate


def asks_for_help(texts: Sequence[str]) -> bool:
    """Say whether a line asks for the options: `--help`, `-h`, or a `?` apart."""
    return any(text in ("--help", "-h", "?", "??") for text in texts)


def parse(options: MagicArgumentParser, line: str) -> argparse.Namespace | None:
    """Return the parsed line; None if it asked for help, which is shown.

    Raises:
        UsageError: the line cannot be read; one line says why.
    """
    texts = split(line)
    if asks_for_help(texts):
        sys.stdout.write(options.format_help())
        return None
    try:
        known, unknown = options.parse_known_args(texts)
    except (UsageError, argparse.ArgumentError) as error:
        raise UsageError(f"{options.prog}: {complaint_of(error)} ({options.prog}? shows the options)") from None
    if unknown:
        complaint = unknown_arguments(unknown, options._option_string_actions)
        raise UsageError(f"{options.prog}: {complaint} ({options.prog}? shows the options)")
    return known


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
    except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user more than a line
        message = f"a mistake in nbguard ({type(error).__name__}: {error} at {line_of(error)}): please report it"
    if interrupted:
        raise KeyboardInterrupt(message)
    raise UsageError(printable(f"{name}: {message}"))


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


def show(shell: Any, options: argparse.Namespace, result: Shown, **details: int | None) -> Shown | None:
    """Display a result once, as text and HTML (or JSON), and keep the object where `-o` or an assignment says.

    Returns the result only if the line assigns it (`plan = %reset_gpu --dry-run`): else it would be displayed a second time
    and stay in `Out`.
    """
    from nbguard.frontend.notebook.display import display_bundle

    keep(shell, options, result)
    bundle = result.json_bundle() if options.json else result.mimebundle(**details)
    display_bundle(bundle, result.display_metadata())
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
