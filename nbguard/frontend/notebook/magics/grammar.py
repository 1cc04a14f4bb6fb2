"""The grammar of a magic: `%gpumem map --request 2GiB`. It also knows the other magics, for a line that belongs to one."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import cleandoc
from typing import Any, NoReturn

from IPython.core.error import UsageError

from nbguard.frontend.arguments import COMMANDS
from nbguard.frontend.grammar import Add, Grammar, LineError, LineParser, Word
from nbguard.frontend.notebook.magics.command_line import asks_for_help, split

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
        """Say whether an option is one of `word`, or of another word that could stand before the rest of the line."""
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
