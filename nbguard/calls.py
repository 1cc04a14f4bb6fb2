"""Texts as they are said where there is no IPython and so no magic, as in scripts and marimo: commands are calls of Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbguard.command_words import command_words
from nbguard.shell import host, running_shell

_MAGIC = r"%(?:gpumem|reset_gpu|nbguard|%?profile_fit)\b"
_QUOTED = re.compile(rf"(`|  )({_MAGIC}[^`\n]*?)(`|  | ,|$)")
"""A command between backticks, or set off by two blanks."""
_WORDS = r"why|map|oom|whatif|snapshot|record o(?:n|ff)|doctor|history|cells on|simulate off|predict|on|log off|notices on"
_UNQUOTED = re.compile(rf"{_MAGIC}(?: (?:{_WORDS})\b)?(?: --[a-z-]+)*")
"""A command amid a sentence: what stands behind it are the sentence's own words, so it has no name."""
_OPTION_OF_ROWS = re.compile(r" \(-n shows more\)|-n shows more|%(?:gpumem) --all\b")
"""The option of a magic that shows more rows, behind a sentence or alone in a cell."""
_BEFORE_JUPYTER = "before Jupyter starts"

_CALLS = {
    "gpumem": "nbguard.report()",
    "gpumem why": 'nbguard.why("NAME")',
    "gpumem why TEXT": "nbguard.why(TEXT)",
    "gpumem oom": "nbguard.oom()",
    "gpumem map": "nbguard.memory_map()",
    "gpumem map --request TEXT": "nbguard.memory_map(TEXT)",
    "gpumem predict": "nbguard.predict()",
    "gpumem predict NAME": "nbguard.predict(NAME)",
    "gpumem record on": "nbguard.record()",
    "gpumem record off": "nbguard.record(False)",
    "gpumem simulate --all": "sim.figures().assumptions",
    "gpumem snapshot": 'nbguard.save_snapshot("FILE")',
    "gpumem snapshot TEXT": "nbguard.save_snapshot(TEXT)",
    "gpumem whatif": "nbguard.whatif_report()",
    "nbguard doctor": "nbguard.diagnose()",
    "nbguard doctor NAME": "nbguard.diagnose(NAME)",
    "nbguard doctor NAME --batch BATCH": "nbguard.diagnose(NAME, BATCH)",
    "nbguard fix determinism": "repeat = nbguard.deterministic()",
    "nbguard fix determinism --warn-only": "repeat = nbguard.deterministic(warn_only=True)",
    "nbguard fix determinism NAME": "repeat = nbguard.deterministic(learn=NAME)",
    "nbguard fix determinism NAME --warn-only": "repeat = nbguard.deterministic(learn=NAME, warn_only=True)",
    "nbguard fix determinism --undo": "repeat.undo()",
    "nbguard fix export NAME": "exportable = nbguard.exportable(NAME)",
    "nbguard fix export NAME --batch BATCH": "exportable = nbguard.exportable(NAME, BATCH)",
    "nbguard record": "nbguard.run_record()",
    "nbguard record NAME": "nbguard.run_record(NAME)",
    "nbguard record NAME -o VARIABLE": "VARIABLE = nbguard.run_record(NAME)",
    "reset_gpu --zombies": "nbguard.zombies()",
    "reset_gpu --zombies --yes": "nbguard.end_zombies()",
    "profile_fit": "nbguard.profile_fit()",
    "profile_fit --last": "nbguard.last_fit()",
    "profile_fit --stop-on-nan": "nbguard.profile_fit(stop_on_nan=True)",
    "profile_fit --save TEXT": "nbguard.profile_fit(save=TEXT)",
}
"""The call for each form of a line but for `%reset_gpu` with names.

TEXT is any word, and a string in the call; the other words in capitals are expressions.
"""
_FORMS = [(tuple(form.split()), call) for form, call in _CALLS.items()]
_FILLED_IN = re.compile(r"\b(TEXT|NAME|BATCH|VARIABLE)\b(?!\")")
_OPTIONS = {"--all": "everything", **{f"--{name}": name for name in ("errors", "compiled", "caches", "workers", "hard")}}
"""Options of `%reset_gpu` that are arguments of `release` and `plan`."""


def has_magics() -> bool:
    """Return whether this process runs under IPython. Does not import it."""
    return running_shell() is not None


def call_of(command: str) -> str:
    """Return the call that does what a magic's line does; empty where only the magic does it, or it cannot be read."""
    try:
        words = command_words(command.lstrip("%"))
    except ValueError:
        return ""
    call = next((_filled_in(call, form, words) for form, call in _FORMS if _fits(form, words)), "")
    return call or (_release(words[1:]) if words[0] == "reset_gpu" else "")


def as_calls(text: str) -> str:
    """Return a text as it is said without IPython: calls for commands, the host's own name, and no option of a magic."""
    text = _OPTION_OF_ROWS.sub("", text)
    if _BEFORE_JUPYTER in text:
        text = text.replace(_BEFORE_JUPYTER, f"before {host()} starts")
    if "%" not in text:
        return text
    text = text.replace("%tb and %debug", "its traceback and a debugger")
    quoted = _QUOTED.sub(lambda found: f"{found[1]}{call_of(found[2].rstrip()) or found[2]}{found[3]}", text)
    return _UNQUOTED.sub(lambda found: call_of(found[0]) or found[0], quoted)


def _release(words: Sequence[str]) -> str:
    names = [_text(word) for word in words if not word.startswith("-")]
    options = tuple(word for word in words if word.startswith("-"))
    if options in (("--park",), ("--unpark",)):
        return f"nbguard.{options[0].lstrip('-')}({', '.join(names)})"
    function = "plan" if "--dry-run" in options else "release"
    options = tuple(option for option in options if option != "--dry-run")
    if not _OPTIONS.keys() >= set(options):
        return ""
    return f"nbguard.{function}({', '.join((*names, *(f'{_OPTIONS[option]}=True' for option in options)))})"


def _fits(form: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether the words are the form's, with anything but an option for its capitals."""
    return len(form) == len(words) and all(
        own == word or (own.isupper() and not word.startswith("-")) for own, word in zip(form, words, strict=True)
    )


def _filled_in(call: str, form: Sequence[str], words: Sequence[str]) -> str:
    given = {own: _text(word) if own == "TEXT" else word for own, word in zip(form, words, strict=True)}
    return _FILLED_IN.sub(lambda found: given[found[0]], call)


def _text(word: str) -> str:
    return repr(word) if '"' in word else f'"{word}"'
