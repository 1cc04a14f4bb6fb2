"""Help texts, signatures and fields in the pages, so that they read in the folder too: python docs/make_help.py writes them.

A page marks each place by a comment, and what stands between it and the comment `end` is made:
`help: %gpumem why` and `help: nbguard diagnose` by the help of a magic or command, `api: nbguard.report` by its signature and
docstring, `fields: report` by the JSON Schema of a result. A test sees that all are current.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
MARK = re.compile(r"<!-- (help|api|fields): ([^\n]+) -->\n.*?<!-- end -->", re.DOTALL)
_COLUMNS = "100"
"""Characters of a line of help."""


def pages() -> list[Path]:
    """Return the pages that have such a place."""
    return [page for page in sorted(DOCS.rglob("*.md")) if MARK.search(page.read_text(encoding="utf-8"))]


def current(text: str) -> str:
    """Return a page's text with all that is made in it made anew."""
    makers: dict[str, Callable[[str], str]] = {"help": _help, "api": _api, "fields": _fields}
    return MARK.sub(lambda found: f"<!-- {found[1]}: {found[2]} -->\n{makers[found[1]](found[2])}\n<!-- end -->", text)


def _help(line: str) -> str:
    return f"```text\n{command_help(line.split()[1]) if line.startswith('nbguard ') else magic_help(line)}\n```"


def magic_help(line: str) -> str:
    """Return what `line --help` prints; for a magic without a word, its docstring with its words or options below it."""
    from nbguard.frontend.notebook.magics.gpumem import GRAMMAR as GPUMEM
    from nbguard.frontend.notebook.magics.gpumem import GpuMemMagics
    from nbguard.frontend.notebook.magics.profile_fit import ProfileFitMagics
    from nbguard.frontend.notebook.magics.reset_gpu import ResetGpuMagics
    from nbguard.frontend.notebook.magics.switch import GRAMMAR as NBGUARD
    from nbguard.frontend.notebook.magics.switch import SwitchMagics

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
        text: str = magics[name].getdoc()
        return text.strip()


def command_help(command: str) -> str:
    """Return what `nbguard COMMAND --help` prints."""
    from nbguard.frontend.cli import main

    with _wide():
        return _printed(main, [command, "--help"])


def _printed(call: Any, argument: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        call(argument)
    return printed.getvalue().strip()


@contextlib.contextmanager
def _wide() -> Iterator[None]:
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


def _api(name: str) -> str:
    """Return the heading, the signature and the docstring of a public name."""
    import nbguard

    named = getattr(nbguard, name.partition(".")[2])
    is_error = isinstance(named, type) and issubclass(named, Exception)
    signature = "" if is_error else re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(named)))
    text = cleandoc(named.__doc__ or "")
    return f"### `{name}`\n\n```text\n{name}{signature}\n```\n\n{_as_markdown(text)}"


_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example):$")
_ENTRY = re.compile(r"^    (\S[^:]*): (.*)$")


def _as_markdown(text: str) -> str:
    """Return a docstring in Google's style as Markdown: sections as words in bold, their entries as lists."""
    lines = []
    for line in text.splitlines():
        if _SECTION.match(line):
            lines += [f"**{line[:-1]}**", ""]
        elif found := _ENTRY.match(line):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            lines.append(line.strip() and f"  {line.strip()}" if line.startswith(" ") else line)
    return "\n".join(lines).rstrip()


def _fields(kind: str) -> str:
    """Return the fields of a result with their meaning, from its JSON Schema."""
    schema = json.loads((DOCS.parent / "nbguard" / "schemas" / f"{kind}.json").read_text(encoding="utf-8"))
    rows = [
        f"| `{name}` | {field['description'].replace('|', '∣')} |"
        for name, field in schema["properties"].items()
        if field.get("description")
    ]
    return "\n".join([f"{schema['description']}", "", "| field | |", "|---|---|", *rows])


if __name__ == "__main__":
    for page in pages():
        page.write_text(current(page.read_text(encoding="utf-8")), encoding="utf-8")
