"""The grammar of a line, for magics and the terminal alike: words, each with its own arguments, help and advice.

A grammar is a table. The parser of a word is built when a line first needs it, as loading nbguard is to cost nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nbguard.errors import NbguardError
from nbguard.spelling import did_you_mean, none_of, unknown_arguments

Add = Callable[[argparse.ArgumentParser], None]
"""Adds the arguments of a word to its parser."""


class LineError(NbguardError, ValueError):
    """A line cannot be read; the message says why, and what to do next. Nothing was done."""


class LineParser(argparse.ArgumentParser):
    """A parser that raises `argparse.ArgumentError` for each mistake, and never ends the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.HelpFormatter, exit_on_error=False, allow_abbrev=False, **options)
        # Since Python 3.14 help is coloured by escape sequences otherwise: a kernel asks for them, whoever reads the text.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Raise the complaint."""
        raise argparse.ArgumentError(None, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(value, action.choices))

    @property
    def option_names(self) -> frozenset[str]:
        """The options that it has, such as `--json`."""
        return frozenset(self._option_string_actions)

    def option(self, name: str) -> argparse.Action:
        """Return an option that it has."""
        return self._option_string_actions[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a line, with the arguments behind it. One that begins with `--` is an option that changes all others."""

    help: str = ""  # its purpose, in a line
    usage: str = ""  # the word and its arguments, for the overview: `why NAME`
    advice: str = ""  # the next step after a mistake: `give one name, as in  %gpumem why learn`
    other: str = ""  # said of arguments that it does not have: `write the script's own after --`
    add: Add = lambda _: None


class Grammar:
    """The words of a magic or of the terminal, by name; "" is the line without one."""

    noun = "word"
    has_help = False  # whether its parsers answer -h and --help themselves

    def __init__(self, name: str, plain: Word, words: Mapping[str, Word]) -> None:
        self.name = name
        self.words = words
        self._all: Mapping[str, Word] = {"": plain, **words}
        self._parsers: dict[str, LineParser] = {}

    @property
    def has_words(self) -> bool:
        """Return whether it takes words as well as options."""
        return any(not word.startswith("-") for word in self.words)

    def parser(self, word: str = "") -> LineParser:
        """Return the parser of a word's arguments."""
        if word not in self._parsers:
            prog = f"{self.name} {word}" if word and not word.startswith("-") else self.name
            made = LineParser(prog=prog, description=self._all[word].help, add_help=self.has_help)
            self.add_common(made)
            self._all[word].add(made)
            self._parsers[word] = made
        return self._parsers[word]

    def add_common(self, parser: LineParser) -> None:
        """Add the arguments that all words have."""

    def read(self, texts: Sequence[str]) -> argparse.Namespace:
        """Return the options of a line; `word` among them is its word, or "".

        Raises:
            LineError: the line cannot be read.
        """
        word, rest = self.divided(texts)
        if not word and self.has_words and texts and not texts[0].startswith("-"):
            question = did_you_mean(texts[0], self.words) or f"say one of {', '.join(self.words)}"
            raise self.mistake("", f"there is no {self.noun} {texts[0]!r}: {question}")
        parser = self.parser(word)
        try:
            options, unknown = parser.parse_known_args(rest)
        except argparse.ArgumentError as error:
            is_of_option = str(error.argument_name).startswith("-")
            complaint = str(error) if is_of_option else error.message
            raise self.mistake(word, complaint, is_of_option=is_of_option and "not allowed with" not in complaint) from None
        if unknown:
            complaint = "; ".join(filter(None, [unknown_arguments(unknown, parser.option_names), self._all[word].other]))
            if word.startswith("-") or not self.has_words:
                complaint = ": ".join(filter(None, [complaint, self._advice_on(word, unknown[0])]))
            raise self.mistake(word, complaint, is_of_option=unknown[0].startswith("-"))
        options.word = word
        return options

    def reads(self, texts: Sequence[str]) -> bool:
        """Return whether a line can be read."""
        try:
            self.read(texts)
        except LineError:
            return False
        return True

    def divided(self, texts: Sequence[str]) -> tuple[str, list[str]]:
        """Return a line's word and the rest, with the word where that is an option."""
        first, *rest = self.word_first(texts) or [""]
        if first in self.words and not first.startswith("-"):
            return first, rest
        typed = {text.partition("=")[0] for text in texts}
        return next((word for word in self.words if word.startswith("-") and word in typed), ""), [*texts]

    def word_first(self, texts: Sequence[str]) -> list[str]:
        """Return a line with its word in front: options may stand before it, too."""
        place = 0
        while place < len(texts) and texts[place].startswith("-"):
            place += 1 + (self._takes_value(texts[place]) and "=" not in texts[place])
        return [*texts] if place >= len(texts) else [texts[place], *texts[:place], *texts[place + 1 :]]

    def words_with(self, option: str) -> list[str]:
        """Return the words that have an option; "" is the line without a word."""
        return [word for word in self._all if option in self.parser(word).option_names]

    def mistake(self, word: str, message: str, *, is_of_option: bool = False) -> LineError:
        """Return a complaint with the next step, which is the word's advice, or the help where it is about an option."""
        if not word or word.startswith("-"):
            return LineError(f"{self.name}: {message} ({self.hint(word)})")
        if is_of_option or not self._all[word].advice:
            return LineError(f"{self.name} {word}: {message} ({self.hint(word)})")
        return LineError(": ".join([f"{self.name} {word}", *filter(None, [message, self._all[word].advice])]))

    def hint(self, word: str) -> str:
        """Return the line that shows the help."""
        raise NotImplementedError

    def _advice_on(self, word: str, text: str) -> str:
        """Return the advice of a word of options where the text is an argument of another one."""
        return self._all[word].advice if word or self.words_with(text.partition("=")[0]) else ""

    def _takes_value(self, option: str) -> bool:
        having = self.words_with(option)
        return bool(having) and self.parser(having[0]).option(option).nargs != 0
