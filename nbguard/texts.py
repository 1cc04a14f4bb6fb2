"""Texts with a form for each host, such as a notebook, a script, a terminal; the host of this process; and safe text."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

# --- The IPython shell of this process, and the host where there is none; neither IPython nor marimo is imported.


def running_shell() -> Any:
    """Return IPython's shell, or None where this process runs without one: a script, marimo, a rank."""
    ipython = sys.modules.get("IPython")  # None as well while it is being imported: it has no function then
    return getattr(ipython, "get_ipython", lambda: None)()


def numbers_of_cells(shell: Any) -> Mapping[str, int]:
    """Return the number of each cell by the file that its code names, as IPython compiled it; the latest of the same source.

    Empty where there is no shell (None). IPython 7, which Colab and Kaggle have, keeps the sources alone, and those in order.
    """
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)
    history = getattr(shell, "history_manager", None)
    if known is None and history is not None:
        files = getattr(linecache, "_ipython_cache", {})
        known = _numbers_by_source(tuple(history.input_hist_parsed), tuple(files))
    return known if isinstance(known, dict) else {}


@lru_cache(maxsize=1)
def _numbers_by_source(inputs: tuple[str, ...], files: tuple[str, ...]) -> dict[str, int]:
    latest = {source: number for number, source in enumerate(inputs) if number}
    sources = {file: "".join(linecache.getlines(file)).rstrip("\n") for file in files}
    return {file: latest[source] for file, source in sources.items() if source in latest}


CELL_CODE = ("<module>", "<cell line")
"""Beginnings of the name that the code of a cell has: Python's, which a script has as well, and IPython 7's."""


def host() -> str:
    """Return the name of the program that the user starts to have this process: Jupyter, marimo, else Python itself."""
    if running_shell() is not None:
        return "Jupyter"
    marimo = sys.modules.get("marimo")
    return "marimo" if getattr(marimo, "running_in_notebook", lambda: False)() else "Python"


# --- Text as it may be printed. Names of files, their contents and variables of the environment are not trusted.


def printable(text: str, kept: str = "") -> str:
    """Return text with a blank for each character that is not printed, as those that steer a terminal or the reading direction.

    Args:
        text: any text.
        kept: characters that stay although they are not printed, such as the end of a line.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character in kept else " " for character in text)


Host: TypeAlias = Literal["notebook", "python", "terminal"]
"""Where a text is read."""


class Text(str):
    """A text that is said differently where there are no magics. Its value is the notebook's form.

    `+`, `joined`, `replace` and `splitlines` keep all forms; an f-string and `str.join` would keep the notebook's alone.
    """

    __slots__ = ("python", "terminal")

    python: str
    terminal: str

    def __new__(cls, notebook: str, python: str | None = None, terminal: str | None = None) -> Text:
        """Return a text; without `python` it is said as in a notebook, without `terminal` as in Python."""
        self = str.__new__(cls, notebook)
        self.python = notebook if python is None else python
        self.terminal = self.python if terminal is None else terminal
        return self

    def __add__(self, other: str) -> Text:
        return joined("", (self, other))

    def __radd__(self, other: str) -> Text:
        return joined("", (other, self))

    def replace(self, *given: Any) -> str:
        """Return the text with something in the place of something else, in each of its forms."""
        return Text(*(str.replace(each, *given) for each in (str(self), self.python, self.terminal)))

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Return the lines, each with its forms; all forms have as many."""
        forms = (str.splitlines(each, keepends) for each in (str(self), self.python, self.terminal))
        return [Text(*each) for each in zip(*forms, strict=True)]


DEBUGGERS = Text("%tb and %debug", "its traceback and a debugger")
MORE = Text("-n shows more", "")
"""Stands where rows are left out: the option of a magic. A result of Python has all of them."""
STOP_OPTION = Text("`--stop-on-nan`", "`stop_on_nan=True`")
"""The option of a profile that ends a fit at its first value that is not finite."""
BEHIND_MORE = Text(" (-n shows more)", "")
"""The same behind a sentence."""


def joined(between: str, parts: Iterable[str]) -> Text:
    """Return parts behind one another as `str.join` does, in each of their forms."""
    each = tuple(parts)
    return Text(
        form(between, "notebook").join(form(part, "notebook") for part in each),
        form(between, "python").join(form(part, "python") for part in each),
        form(between, "terminal").join(form(part, "terminal") for part in each),
    )


def capitalised(text: str) -> Text:
    """Return a text whose first letter is a capital, in each of its forms."""
    forms = (form(text, "notebook"), form(text, "python"), form(text, "terminal"))
    return Text(*(f"{each[:1].upper()}{each[1:]}" for each in forms))


def form(text: str, where: Host) -> str:
    """Return a text as it is said to a host: a plain string."""
    if not isinstance(text, Text):
        return text
    return str(text) if where == "notebook" else text.python if where == "python" else text.terminal


def here() -> Host:
    """Return the host of this process: a notebook where it runs under IPython, else Python."""
    return "python" if running_shell() is None else "notebook"


def before_start() -> Text:
    """Return "before Jupyter starts", with the name of the program that is started where it is not Jupyter."""
    return Text("before Jupyter starts", f"before {host()} starts")
