"""The reference is complete: each word, command and public name has its place, and each command line parses."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

import nbguard
from nbguard.frontend.cli import TERMINAL
from nbguard.frontend.notebook.magics.command_line import MagicGrammar
from nbguard.frontend.notebook.magics.gpumem import GRAMMAR as GPUMEM
from nbguard.frontend.notebook.magics.switch import GRAMMAR as NBGUARD
from tests.programs import docs_program
from tests.site.pages import DOCS, ROOT, blocks, files


@pytest.mark.parametrize(("page", "grammar"), [("gpumem", GPUMEM), ("nbguard", NBGUARD)])
def test_each_word_of_a_magic_has_its_section(page: str, grammar: MagicGrammar) -> None:
    text = (DOCS / "magics" / f"{page}.md").read_text(encoding="utf-8")

    assert re.findall(rf"^<!-- help: {grammar.name} ([\w-]+) -->$", text, re.MULTILINE) == list(grammar.words)


def test_each_command_has_its_section() -> None:
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")

    assert sorted(re.findall(r"^<!-- help: nbguard (\w+) -->$", text, re.MULTILINE)) == sorted(commands())


def commands() -> list[str]:
    return list(TERMINAL.words)


def test_each_public_name_has_its_entry() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^<!-- api: nbguard\.(\w+) -->$", text, re.MULTILINE)

    assert sorted(named) == sorted([*nbguard.__all__, "FitMonitor", "Sidebar", "SurviveOOM"])


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)), reason="argparse words its help otherwise")
@pytest.mark.usefixtures("torch_process")  # the monitor is a callback of fastai's
def test_what_is_made_in_the_pages_is_current() -> None:
    make_help = docs_program("make_help")
    stale = [page.name for page in make_help.pages() if make_help.current(text := page.read_text("utf-8")) != text]

    assert stale == [], "python docs/make_help.py writes them anew"


@pytest.mark.parametrize("page", [*files(), ROOT / "README.md"], ids=lambda page: page.name)
def test_each_command_line_is_one_that_nbguard_reads(page) -> None:  # type: ignore[no-untyped-def]
    text = "\n".join([*blocks(page, "sh"), *re.findall(r"`(nbguard [a-z][^`]*)`", page.read_text(encoding="utf-8"))])
    for line in re.findall(r"^(?:\$ )?nbguard (.*)$", text, re.MULTILINE):
        words = shlex.split(line.partition(" > ")[0], comments=True)
        try:
            TERMINAL.read(words)
        except SystemExit as error:
            raise AssertionError(f"{page}: nbguard {line}") from error
