"""Typing mistakes, corrected by the known word that looks like the one that was typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_ALIKE = 0.6
"""Least share of equal letters of two words that look alike, by `difflib`."""


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return a question such as `did you mean learn?`; an empty string where nothing known looks like the word.

    Case, hyphens and underscores do not count: `--dryrun` looks like `--dry-run`.

    Args:
        word: the word as typed.
        known: the words that could have been meant.
        most: how many of them the question names at most.
    """
    by_letters = {_letters(each): each for each in known}
    near = get_close_matches(_letters(word), by_letters, n=most, cutoff=_ALIKE)
    return f"did you mean {' or '.join(by_letters[each] for each in near)}?" if near else ""


def unknown_arguments(unknown: Sequence[str], options: Iterable[str]) -> str:
    """Return the complaint about arguments that a command does not have.

    Args:
        unknown: the arguments as typed: `--jsno`, or `--bsz=4`.
        options: the options that the command has: `--json`.
    """
    complaint = f"unrecognized arguments: {' '.join(unknown)}"
    first = unknown[0].partition("=")[0]
    question = did_you_mean(first, (each for each in options if each.startswith("--"))) if first.startswith("-") else ""
    return f"{complaint}: {question}" if question else complaint


def none_of(word: str, choices: Iterable[str]) -> str:
    """Return the complaint about a word that is none of a few, with all of them: `'of' is not one of on, off`."""
    return f"{word!r} is not one of {', '.join(choices)}"


def _letters(word: str) -> str:
    """Return the letters and digits of a word in lower case; of a word without any, the word."""
    return "".join(letter for letter in word.casefold() if letter.isalnum()) or word
