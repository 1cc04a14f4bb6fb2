"""Directives whose text is a parser's own help: `{magic} %gpumem map` and `{command} diagnose`. So no option goes unsaid."""

from __future__ import annotations

import contextlib
import io
import os
from inspect import cleandoc
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_COLUMNS = "100"
"""Characters of a line of help."""


class MagicHelp(SphinxDirective):
    """The help of a magic, or of one of its words, as IPython shows it."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the help as a literal block."""
        return [nodes.literal_block("", magic_help(self.arguments[0]), language="text")]


class CommandHelp(SphinxDirective):
    """The help of a command of the command line."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the help as a literal block."""
        return [nodes.literal_block("", command_help(self.arguments[0]), language="text")]


def magic_help(line: str) -> str:
    """Return what `line --help` prints; for a magic without a word, its docstring with its words or options below it."""
    from nbguard.notebook.magics.gpumem import GRAMMAR as GPUMEM
    from nbguard.notebook.magics.gpumem import GpuMemMagics
    from nbguard.notebook.magics.profile_fit import ProfileFitMagics
    from nbguard.notebook.magics.reset_gpu import ResetGpuMagics
    from nbguard.notebook.magics.switch import GRAMMAR as NBGUARD
    from nbguard.notebook.magics.switch import SwitchMagics

    magics: dict[str, Any] = {
        "%gpumem": GpuMemMagics.gpumem,
        "%reset_gpu": ResetGpuMagics.reset_gpu,
        "%%profile_fit": ProfileFitMagics.profile_fit,
        "%nbguard": SwitchMagics.nbguard,
    }
    name, _, word = line.partition(" ")
    with _wide():
        if word:
            grammar = {"%gpumem": GPUMEM, "%nbguard": NBGUARD}[name]
            return _printed(grammar.parse, f"{word} --help")
        magic = magics[name]
        text: str = magic.getdoc() if hasattr(magic, "getdoc") else cleandoc(magic.__doc__ or "")
        return text.strip()


def command_help(command: str) -> str:
    """Return what `nbguard COMMAND --help` prints."""
    from nbguard.cli import main

    with _wide():
        return _printed(main, [command, "--help"])


def _printed(call: Any, argument: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        call(argument)
    return printed.getvalue().strip()


@contextlib.contextmanager
def _wide() -> Any:
    """Have argparse fill lines of one width, whatever the terminal."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    app.add_directive("magic", MagicHelp)
    app.add_directive("command", CommandHelp)
    return {"parallel_read_safe": True}
