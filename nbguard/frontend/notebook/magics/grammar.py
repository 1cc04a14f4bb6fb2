"""The grammar of a magic with words: `%gpumem map --request 2GiB`. Each word has options of its own, and help of its own.

A grammar is a table; its parsers are built when the magic is first used, as loading nbguard is to cost nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from nbguard.frontend.notebook.magics.command_line import (
    MagicParser,
    add_common,
    asks_for_help,
    complaint_of,
    is_of_option,
    parser,
    split,
)
from nbguard.spelling import did_you_mean, unknown_arguments

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

_HELP = re.compile(r"\s*%(?P<magic>\w+)\s+(?P<word>[\w-]+)\s*\?{1,2}\s*")
_INDENT = " " * 4
_grammars: list[Grammar] = []
_with_options: list[MagicOfOptions] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a magic, with the arguments behind it."""

    usage: str  # the word and its arguments, for the overview: `why NAME`
    help: str  # its purpose, in a line
    advice: str  # the next step after a mistake: `give one name, as in  %gpumem why learn`
    add: Callable[[MagicArgumentParser], None] = lambda _: None  # adds its arguments to a parser


class Grammar:
    """A magic's words; `plain` are the arguments of the magic without one, `word_of_name` is the word that takes a name."""

    def __init__(self, magic: str, plain: Word, words: Mapping[str, Word], *, word_of_name: str = "") -> None:
        self.magic = magic
        self.words = words
        self._plain = plain
        self._word_of_name = word_of_name
        _grammars.append(self)

    def parse(self, line: str, names: Collection[str] = ()) -> argparse.Namespace | None:
        """Return the parsed line, its `word` (or None) among the options, or None if it asked for help, which is shown.

        Args:
            line: the text after the magic.
            names: of the user's.

        Raises:
            UsageError: the line cannot be read; one line says why, and what to do next.
        """
        texts = self._word_first(split(line))
        word = texts[0] if texts and texts[0] in self.words else None
        self._refuse_what_goes_elsewhere(word, texts, names)
        if asks_for_help(texts):
            sys.stdout.write(f"{self.overview()}\n" if word is None else self._of_word(word).format_help())
            return None
        for text in texts:
            if goes_with := self._goes_with(word, text.partition("=")[0]):
                raise UsageError(f"{self.magic}: {goes_with}")
        if word is None and texts and not texts[0].startswith("-"):
            question = did_you_mean(texts[0], self.words) or f"say one of {', '.join(self.words)}"
            raise UsageError(f"{self.magic}: unknown word {texts[0]!r}: {question} ({self.magic}? shows what there is)")
        try:
            options, unknown = self._parser.parse_known_args(texts)
        except (UsageError, argparse.ArgumentError) as error:
            is_alone = is_of_option(error) and "not allowed with" not in str(error)
            raise UsageError(self._mistake(word, complaint_of(error), is_of_option=is_alone)) from None
        if unknown:
            of_word = self._parser if word is None else self._of_word(word)
            complaint = unknown_arguments(unknown, of_word._option_string_actions)
            raise UsageError(self._mistake(word, complaint, is_of_option=unknown[0].startswith("-")))
        return options

    def reads(self, texts: Sequence[str]) -> bool:
        """Return whether the words of a line can be parsed, or ask for help."""
        try:
            return asks_for_help(texts) or not self._parser.parse_known_args([*texts])[1]
        except (UsageError, argparse.ArgumentError):
            return False

    def words_with(self, option: str) -> list[str]:
        """Return the words that have an option; "" is the magic without a word."""
        return [word for word, _ in self._actions(option)]

    def misused(self, word: str, message: str = "") -> NoReturn:
        """Raise UsageError about a word, with its advice."""
        raise UsageError(self._mistake(word, message))

    def overview(self) -> str:
        """Return the words, a line for each: what `%gpumem --help` shows, and `%gpumem?` below the docstring."""
        width = max(len(word.usage) for word in self.words.values()) + 2
        indent = len(_INDENT) + width
        lines = [
            textwrap.fill(word.help, 110, initial_indent=_INDENT + word.usage.ljust(width), subsequent_indent=" " * indent)
            for word in self.words.values()
        ]
        first = next(iter(self.words))
        return "\n".join(
            [
                f"{self.magic} {self._plain.usage}".rstrip(),
                f"{_INDENT}{self._plain.help}",
                "",
                f"Words ({self.magic} {first}? or {self.magic} {first} --help shows the options of one):",
                *lines,
                "",
                "Each also takes --json (the result as JSON, bytes as integers) and -o NAME (put the result into a variable).",
            ]
        )

    def _refuse_what_goes_elsewhere(self, word: str | None, texts: list[str], names: Collection[str]) -> None:
        """Raise UsageError with the right command, if a word or an option is another magic's, or a name stands for a word."""
        first = texts[0] if texts else ""
        if word is None and self._word_of_name and first in names:
            raise UsageError(
                f"{self.magic}: {first} is a name: run  {self.magic} {self._word_of_name} {first}  to see what keeps it alive"
            )
        rest = texts if word is None else texts[1:]
        others = [text for text in texts if text.startswith("--") and not self._takes(word, text.partition("=")[0], rest)]
        elsewhere = of_another_magic(self.magic, texts) if word is None else ""
        elsewhere = elsewhere or option_of_another_magic(self.magic, others, rest)
        if elsewhere:
            raise UsageError(f"{self.magic}: {elsewhere}")

    @cached_property
    def _parser(self) -> MagicArgumentParser:
        """Return the parser of the magic, with one for each word."""
        main = parser(self.magic, self._plain.help)
        self._plain.add(main)
        words = main.add_subparsers(dest="word", metavar="WORD", parser_class=MagicParser)
        for name, word in self.words.items():
            options = words.add_parser(
                name, prog=f"{self.magic} {name}", description=word.help, formatter_class=main.formatter_class
            )
            add_common(options)
            word.add(options)
        return main

    def _of_word(self, word: str) -> MagicArgumentParser:
        parsers: dict[str, MagicArgumentParser] = self._subparsers.choices  # type: ignore[assignment]
        return parsers[word]

    @property
    def _subparsers(self) -> argparse.Action:
        return next(action for action in self._parser._actions if action.dest == "word")

    def _word_first(self, texts: list[str]) -> list[str]:
        """Return the line with its word in front: options may stand before it, too."""
        place = 0
        while place < len(texts) and texts[place].startswith("-"):
            place += 1 + (self._takes_value(texts[place]) and "=" not in texts[place])
        return texts if place >= len(texts) else [texts[place], *texts[:place], *texts[place + 1 :]]

    def _takes_value(self, option: str) -> bool:
        actions = self._actions(option)
        return bool(actions) and actions[0][1].nargs != 0

    def _actions(self, option: str) -> list[tuple[str, argparse.Action]]:
        """Return (word, action) of each word that has an option; "" is the magic without a word."""
        parsers = {"": self._parser, **{word: self._of_word(word) for word in self.words}}
        return [
            (word, one._option_string_actions[option]) for word, one in parsers.items() if option in one._option_string_actions
        ]

    def _takes(self, word: str | None, option: str, rest: list[str]) -> bool:
        """Say whether an option is one of `word`, or of another word that could stand before the rest of the line."""
        having = [name for name, _ in self._actions(option)]
        return (word or "") in having or any(self.reads([name, *rest] if name else rest) for name in having)

    def _goes_with(self, word: str | None, option: str) -> str:
        """Return the words that an option goes with, if it is not one of `word`; empty if it is, or goes with none."""
        having = {name: action for name, action in self._actions(option) if name}
        if not option.startswith("--") or not having or (word or "") in dict(self._actions(option)):
            return ""
        first, action = next(iter(having.items()))
        example = f"{self.magic} {first} {option} {action.metavar or ''}".rstrip()
        return f"{option} belongs to {' and '.join(having)}, as in  {example}"

    def _mistake(self, word: str | None, message: str, *, is_of_option: bool = False) -> str:
        """Return a complaint with the next step: the word's advice, or the help where it is about an option."""
        if word is None:
            return f"{self.magic}: {message} ({self.magic}? shows what there is)"
        if is_of_option:
            return f"{self.magic} {word}: {message} ({self.magic} {word}? shows its options)"
        return ": ".join([f"{self.magic} {word}", *filter(None, [message, self.words[word].advice])])


def with_words(grammar: Grammar) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that shows a magic's words in its help (`%gpumem?`)."""

    def decorate(magic: Callable[..., Any]) -> Callable[..., Any]:
        magic.__doc__ = f"{(magic.__doc__ or '').rstrip()}\n\n{textwrap.indent(grammar.overview(), ' ' * 8)}\n"
        return magic

    return decorate


def help_of_word(*grammars: Grammar) -> Callable[[list[str]], list[str]]:
    """Return an IPython input transformer that reads `%gpumem map?` as `%gpumem map --help`.

    IPython itself would look for help on `map`. Only a cell with nothing else in it is changed.
    """
    magics = {grammar.magic.removeprefix("%") for grammar in grammars}
    words = {word for grammar in grammars for word in grammar.words}

    def as_help(lines: list[str]) -> list[str]:
        match = _HELP.fullmatch("".join(lines)) if len(lines) <= _FEW else None
        if match is None or match["magic"] not in magics or match["word"] not in words:
            return lines
        return [f"%{match['magic']} {match['word']} --help\n"]

    return as_help


_FEW = 10
"""Lines of a cell that may be blank around its one; a longer one is nothing but code."""


# --- what stands behind the wrong magic ---

TERMINAL_COMMANDS = frozenset({"completion", "diagnose", "disable", "enable", "gpus", "lock", "profile", "replay", "schema"})
"""Commands of `nbguard` in a terminal that no magic has."""


def of_another_magic(magic: str, texts: Sequence[str]) -> str:
    """Return the magic that a line's word belongs to, and the command to run; empty where no other magic has it.

    Args:
        magic: the magic that the line has been given to, which has no such word: `%gpumem`.
        texts: the line's words, the one in question first.
    """
    word = texts[0] if texts else ""
    for grammar in _others(magic):
        if word in grammar.words:
            advice = f"run  {grammar.magic} {' '.join(texts)}" if grammar.reads(texts) else grammar.words[word].advice
            return f"{word} is a word of {grammar.magic}: {advice}"
    if word in TERMINAL_COMMANDS:
        return f"{word} is a command of the terminal: run  !nbguard {' '.join(texts)}"
    return ""


def option_of_another_magic(magic: str, options: Sequence[str], texts: Sequence[str]) -> str:
    """Return the same for the first of a line's options that another magic has.

    Args:
        magic: the magic that the line has been given to.
        options: those that it does not have, as typed: `--request=2GiB`.
        texts: the line's words.
    """
    names = [text.partition("=")[0] for text in options if text.startswith("--")]
    return next(filter(None, (_of_option(magic, name, texts) for name in names)), "")


def _of_option(magic: str, option: str, texts: Sequence[str]) -> str:
    for grammar in _others(magic):
        for word in grammar.words_with(option):
            line = [word, *texts] if word else [*texts]
            if grammar.reads(line):
                return f"{option} belongs to {grammar.magic}: run  {grammar.magic} {' '.join(line)}"
    for other in _with_options:
        if magic != other.name and option in other.options:
            advice = f"run  {other.name} {' '.join(texts)}" if other.reads(texts) else f"{other.name}? shows the options"
            return f"{option} belongs to {other.name}: {advice}"
    return ""


def _others(magic: str) -> list[Grammar]:
    return [grammar for grammar in _grammars if grammar.magic != magic]


@dataclass(frozen=True, slots=True)
class MagicOfOptions:
    """A magic without words of its own, for lines that have been given to another one."""

    name: str
    options: Collection[str]
    parse: Callable[[Sequence[str]], object]  # raises UsageError where the words cannot be read

    def __post_init__(self) -> None:
        """Have it known."""
        _with_options.append(self)

    def reads(self, texts: Sequence[str]) -> bool:
        """Return whether it can read a line's words."""
        try:
            self.parse(texts)
        except UsageError:
            return False
        return True
