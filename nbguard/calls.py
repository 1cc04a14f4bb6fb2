"""Commands as calls of Python, for scripts, marimo and wherever else there is no IPython and so no magic."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

_MAGIC = r"%(?:gpumem|reset_gpu|nbguard|%profile_fit)\b"
_QUOTED = re.compile(rf"(`|  )({_MAGIC}[^`\n]*?)(`|  | ,|$)")
"""A command between backticks, or set off by two blanks."""
_WORDS = r"why|map|oom|whatif|snapshot|record o(?:n|ff)|doctor|history|cells on|simulate off|predict|on|log off|notices on"
_UNQUOTED = re.compile(rf"{_MAGIC}(?: (?:{_WORDS})\b)?(?: --[a-z-]+)*")
"""A command amid a sentence: what stands behind it are the sentence's own words, so it has no name."""
_OPTIONS = ("errors", "compiled", "caches", "workers", "hard")
_RELEASE = {"--all": "everything=True", **{f"--{word}": f"{word}=True" for word in _OPTIONS}}
"""Options of `%reset_gpu` that are arguments of `release` and `plan`."""


def has_magics() -> bool:
    """Return whether this process runs under IPython. Does not import it."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython, "get_ipython", lambda: None)() is not None


def call_of(command: str) -> str:
    """Return the call that does what a magic's line does; empty where only the magic does it."""
    magic, *words = command.split()
    if magic.endswith("reset_gpu"):
        return _release(words)
    if magic.endswith("profile_fit"):
        return _profile(words)
    word, *rest = words or [""]
    form = (_REPORTS if magic.endswith("gpumem") else _OTHERS).get(word)
    return form(rest) if form else ""


def as_calls(text: str) -> str:
    """Return a text in which each command that has a call is that call."""
    if "%" not in text:
        return text
    quoted = _QUOTED.sub(lambda found: f"{found[1]}{call_of(found[2].rstrip()) or found[2]}{found[3]}", text)
    return _UNQUOTED.sub(lambda found: call_of(found[0]) or found[0], quoted)


def _release(words: list[str]) -> str:
    names = [_text(word) for word in words if not word.startswith("--")]
    options = [word for word in words if word.startswith("--")]
    match options:
        case ["--park"]:
            return f"nbguard.park({', '.join(names)})"
        case ["--unpark"]:
            return f"nbguard.unpark({', '.join(names)})"
        case ["--zombies"]:
            return "nbguard.zombies()"
        case ["--zombies", "--yes"]:
            return "nbguard.end_zombies()"
    function = "plan" if "--dry-run" in options else "release"
    options = [option for option in options if option != "--dry-run"]
    if not all(option in _RELEASE for option in options):
        return ""
    return f"nbguard.{function}({', '.join((*names, *(_RELEASE[option] for option in options)))})"


def _plain(call: str) -> Callable[[list[str]], str]:
    """Return the form of a command that takes no words: with some there is no call."""
    return lambda words: "" if words else call


def _named(function: str, what: str) -> Callable[[list[str]], str]:
    """Return the form of a command that takes one text; amid a sentence it has none, and `what` says what is meant."""
    return lambda words: f"{function}({_text(words[0] if words else what)})" if len(words) <= 1 else ""


def _text(word: str) -> str:
    return repr(word) if '"' in word else f'"{word}"'


def _record(words: list[str]) -> str:
    return {"on": "nbguard.record()", "off": "nbguard.record(False)"}.get(" ".join(words), "")


def _map(words: list[str]) -> str:
    match words:
        case []:
            return "nbguard.memory_map()"
        case ["--request", size]:
            return f"nbguard.memory_map({_text(size)})"
    return ""


def _tried(function: str) -> Callable[[list[str]], str]:
    """Return the form of a command that takes a Learner's or a model's name, and the name of a batch."""

    def form(words: list[str]) -> str:
        match words:
            case [] | [_]:
                return f"{function}({''.join(words)})"
            case [name, "--batch", batch]:
                return f"{function}({name}, {batch})"
        return ""

    return form


def _profile(words: list[str]) -> str:
    """Return the context manager under which a cell's code would stand."""
    match words:
        case []:
            return "nbguard.profile_fit()"
        case ["--stop-on-nan"]:
            return "nbguard.profile_fit(stop_on_nan=True)"
        case ["--save", file]:
            return f"nbguard.profile_fit(save={_text(file)})"
    return ""


def _run_record(words: list[str]) -> str:
    match words:
        case [] | [_]:
            return f"nbguard.run_record({''.join(words)})"
        case [name, "-o", variable]:
            return f"{variable} = nbguard.run_record({name})"
    return ""


def _fix(words: list[str]) -> str:
    match words:
        case ["determinism", "--undo"]:
            return "repeat.undo()"
        case ["determinism", *rest]:
            given = ("warn_only=True" if word == "--warn-only" else f"learn={word}" for word in rest)
            return f"repeat = nbguard.deterministic({', '.join(given)})"
        case ["export", *rest]:
            call = _tried("nbguard.exportable")(rest)
            return f"exportable = {call}" if call and rest else ""
    return ""


_REPORTS: dict[str, Callable[[list[str]], str]] = {
    "": _plain("nbguard.report()"),
    "why": _named("nbguard.why", "NAME"),
    "oom": _plain("nbguard.oom()"),
    "map": _map,
    "predict": _tried("nbguard.predict"),
    "record": _record,
    "snapshot": _named("nbguard.save_snapshot", "FILE"),
    "whatif": _plain("nbguard.whatif_report()"),
}
"""Words of `%gpumem`, and how the call is written."""
_OTHERS: dict[str, Callable[[list[str]], str]] = {"doctor": _tried("nbguard.diagnose"), "fix": _fix, "record": _run_record}
"""The same of `%nbguard`."""
