"""The grammar of a magic, the words of its line, calls on its behalf, and its result, shown once."""

from __future__ import annotations

import argparse
import dis
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from types import FrameType
from typing import Any, NoReturn, TypeVar

from IPython.core.error import UsageError

from nbguard.errors import NbguardError, line_of
from nbguard.frontend.arguments import COMMANDS
from nbguard.frontend.grammar import Add, Grammar, LineError, LineParser, Word
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


def guarded(
    name: str, call: Callable[..., Returned], *args: Any, when: str = "during its scan; nothing was changed", **kw: Any
) -> Returned:
    """Call the API; an error becomes one line for the user, without a traceback of ours.

    The new error is raised when the old one is gone, not while it is handled: as its context, the old one's frames, which
    hold the user's objects, would become part of IPython's last error. That goes for an interrupt and our own mistakes too.

    `when`: the end of the sentence on an interrupt.
    """
    interrupted = False
    try:
        with showing_progress():
            return call(*args, **kw)
    except NbguardError as error:
        message = str(error)
    except KeyboardInterrupt:
        interrupted, message = True, f"{name} was interrupted {when}"
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


# --- The grammar of a magic: `%gpumem map --request 2GiB`. It also knows the other magics, for a line that belongs to one


_HELP = re.compile(r"\s*%(?P<magic>\w+)\s+(?P<word>[\w-]+)\s*\?{1,2}\s*")
_INDENT = " " * 4
_magics: list[MagicGrammar] = []


class MagicGrammar(Grammar):
    """A magic's words, and their help.

    Args:
        name: `%gpumem`.
        plain: the arguments of the magic without a word.
        words: by name; those that begin with `--` are options that change all others.
        word_of_name: the word that takes a name of the user's.
        as_json: whether `--json` shows the result as JSON.
        add_all: adds each argument of all words once, for the help of a magic whose words are options.
    """

    def __init__(
        self,
        name: str,
        plain: Word,
        words: dict[str, Word],
        *,
        word_of_name: str = "",
        as_json: bool = True,
        add_all: Add | None = None,
    ) -> None:
        super().__init__(name, plain, words)
        self._word_of_name = word_of_name
        self._as_json = as_json
        self._add_all = add_all
        _magics.append(self)

    def add_common(self, parser: LineParser) -> None:
        """Add `--json` and `-o`."""
        if self._as_json:
            parser.add_argument("--json", action="store_true", help="the result as JSON, bytes as integers")
        parser.add_argument(
            "-o", metavar="NAME", dest="output", type=_variable, help="also put the result object into the variable NAME"
        )

    def parse(self, line: str, names: Collection[str] = ()) -> argparse.Namespace | None:
        """Return the options of a line, its `word` (or "") among them, or None if it asked for help, which is shown.

        Args:
            line: the text after the magic.
            names: of the user's.

        Raises:
            UsageError: the line cannot be read; one line says why, and what to do next.
        """
        texts = split(line)
        word, rest = self.divided(texts)
        if elsewhere := self._elsewhere(word, texts, rest, names):
            raise UsageError(f"{self.name}: {elsewhere}")
        if asks_for_help(texts):
            sys.stdout.write(self.parser(word).format_help() if word and self.has_words else f"{self.overview()}\n")
            return None
        try:
            return self.read(texts)
        except LineError as error:
            message = str(error)
        raise UsageError(message)

    def reads(self, texts: Sequence[str]) -> bool:
        """Return whether a line can be read, or asks for help."""
        return asks_for_help(texts) or super().reads(texts)

    def misused(self, word: str, message: str = "") -> NoReturn:
        """Raise UsageError about a word, with its advice."""
        raise UsageError(str(self.mistake(word, message)))

    def hint(self, word: str) -> str:
        """Return the line that shows the help."""
        if self.has_words:
            return f"{self.name} {word}? shows its options" if word else f"{self.name}? shows what there is"
        return f"{self.name}? shows the options"

    def overview(self) -> str:
        """Return the words, a line for each, or all options of a magic without words of its own, as `--help` shows it."""
        return self._words() if self.has_words else self._options()

    def _words(self) -> str:
        width = max(len(word.usage) for word in self.words.values()) + 2
        indent = len(_INDENT) + width
        lines = [
            textwrap.fill(word.help, 110, initial_indent=_INDENT + word.usage.ljust(width), subsequent_indent=" " * indent)
            for word in self.words.values()
        ]
        first = next(iter(self.words))
        plain = self._all[""]
        return "\n".join(
            [
                f"{self.name} {plain.usage}".rstrip(),
                f"{_INDENT}{plain.help}",
                "",
                f"Words ({self.name} {first}? or {self.name} {first} --help shows the options of one):",
                *lines,
                "",
                "Each also takes --json (the result as JSON, bytes as integers) and -o NAME (put the result into a variable).",
            ]
        )

    def _options(self) -> str:
        if self._add_all is None:
            return self.parser().format_help().rstrip()
        whole = LineParser(prog=self.name, description=self._all[""].help, add_help=False)
        self.add_common(whole)
        self._add_all(whole)
        usages = [self.parser(word).format_usage().partition(": ")[2].rstrip() for word in self._all]
        whole.usage = "\n       ".join(usages).replace("%", "%%")
        return whole.format_help().rstrip()

    def _elsewhere(self, word: str, texts: list[str], rest: list[str], names: Collection[str]) -> str:
        """Return the right line where a word or option is another magic's or word's, or a name stands for a word."""
        first, *_ = texts = self.word_first(texts) or [""]
        if not word and self._word_of_name and first in names:
            return f"{first} is a name: run  {self.name} {self._word_of_name} {first}  to see what keeps it alive"
        options = [text.partition("=")[0] for text in texts if text.startswith("--")]
        others = [option for option in options if not self._takes(word, option, rest)]
        found = "" if word or first in names else self._of_another(texts)
        found = found or next(filter(None, (self._of_option(option, rest) for option in others)), "")
        return found or next(filter(None, (self._goes_with(word, option) for option in options)), "")

    def _of_another(self, texts: list[str]) -> str:
        """Return the magic that has the line's word, and the line to run."""
        for grammar in self._others():
            if (word := texts[0]) in grammar.words and not word.startswith("-"):
                advice = f"run  {grammar.name} {' '.join(texts)}" if grammar.reads(texts) else grammar.words[word].advice
                return f"{word} is a word of {grammar.name}: {advice}"
        if any(texts[0] in commands for commands in COMMANDS.values()):
            return f"{texts[0]} is a command of the terminal: run  !nbguard {' '.join(texts)}"
        return ""

    def _of_option(self, option: str, rest: list[str]) -> str:
        """Return the magic that has an option, and the line to run, or the line that shows its help."""
        having = [(grammar, word) for grammar in self._others() for word in grammar.words_with(option)]
        for grammar, word in having:
            line = [word, *rest] if word and not word.startswith("-") else rest
            if grammar.reads(line):
                return f"{option} belongs to {grammar.name}: run  {grammar.name} {' '.join(line)}"
        shown = next((grammar for grammar, _ in having if not grammar.has_words), None)
        return f"{option} belongs to {shown.name}: {shown.hint('')}" if shown else ""

    def _others(self) -> Iterable[MagicGrammar]:
        return (grammar for grammar in _magics if grammar is not self)

    def _takes(self, word: str, option: str, rest: list[str]) -> bool:
        """Say whether `word` has an option, or another word that could stand before the rest of the line."""
        if option in self.parser(word).option_names:
            return True
        having = self.words_with(option)
        return any(self.reads([name, *rest] if name else rest) for name in having) if self.has_words else bool(having)

    def _goes_with(self, word: str, option: str) -> str:
        """Return the words that an option goes with, if it is not one of `word`; empty if it is, or goes with none."""
        if not self.has_words or option in self.parser(word).option_names:
            return ""
        having = self.words_with(option)
        if not any(having):
            return ""
        first, *_ = words = [*filter(None, having)]
        example = f"{self.name} {first} {option} {self.parser(first).option(option).metavar or ''}"
        return f"{option} belongs to {' and '.join(words)}, as in  {example}".rstrip()


def _variable(name: str) -> str:
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name} is not the name of a variable: write it as in  -o report")
    return name


def documented(grammar: MagicGrammar) -> Callable[[Any], Any]:
    """Return a decorator that shows a magic's words or options in its help (`%gpumem?`).

    IPython asks a magic for its help by `getdoc()` where it has one: so parsers are built when somebody first asks.
    """

    def decorate(magic: Any) -> Any:
        magic.getdoc = lambda: f"{cleandoc(magic.__doc__ or '')}\n\n{grammar.overview()}\n"
        return magic

    return decorate


def help_of_word(lines: list[str]) -> list[str]:
    """Read `%gpumem map?` as `%gpumem map --help`: an IPython input transformer.

    IPython itself would look for help on `map`. Only a cell with nothing else in it is changed.
    """
    match = _HELP.fullmatch("".join(lines)) if len(lines) <= _FEW else None
    if match is None:
        return lines
    grammars = {grammar.name.removeprefix("%"): grammar for grammar in _magics if grammar.has_words}
    if match["magic"] not in grammars or all(match["word"] not in grammar.words for grammar in grammars.values()):
        return lines
    return [f"%{match['magic']} {match['word']} --help\n"]


_FEW = 10
"""Lines of a cell that may be blank around its one; a longer one is nothing but code."""
