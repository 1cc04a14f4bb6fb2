"""What is printed and shown cannot steer a terminal, whichever part of it is a stranger's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nbguard.errors import NbguardError, RankFactsError, SnapshotError
from nbguard.frontend.cli import commands, main
from nbguard.frontend.notebook.display import line_bundle
from nbguard.render.html import (
    Bar,
    Block,
    FactLines,
    Head,
    Line,
    Listing,
    Point,
    Points,
    Section,
    Slice,
    Table,
    TableRow,
    Title,
    blocks_html,
)
from nbguard.render.text import blocks_text
from nbguard.texts import printable
from tests.fuzz.bounds import complaints, unescaped
from tests.fuzz.values import ESCAPES, HTML

T = f"{HTML}{ESCAPES}\nforged"
BLOCKS: tuple[Block, ...] = (
    Head(T, T, T, warns=True),
    Section(T, T, T),
    Title(T, "strong"),
    Line(T),
    FactLines(((T, T),)),
    Table(rows=(TableRow(cells=(T, T, T), rails="", hint=T),), names=(T, T, T), figures=(1,), code=(0,), chips=(2,), fold=T),
    Bar(slices=(Slice(name=T, figure=T, amount=5, colour="used", note=T),), name=T, label=T, is_drawn_as_text=True),
    Listing(sentences=(T, T), title=T),
    Points((Point(word=T, what=T, lines=(T,)),), title=T),
    Points((Point(word=T, what=T, lines=(T,)),), title=T, is_numbered=True),
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_a_block_of_a_strangers_words(block: Block) -> None:
    plain = blocks_text((type(block)(**_with_plain_words(block)),))

    text, page = blocks_text((block,)), str(blocks_html((block,), T))

    assert complaints([text, page]) == []
    assert unescaped([page]) == []
    assert text.count("\n") == plain.count("\n"), "a line was forged"


def _with_plain_words(block: Block) -> dict[str, object]:
    return {name: _plain(getattr(block, name)) for name in block.__dataclass_fields__}


def _plain(value: object) -> object:
    if isinstance(value, str):
        return value.replace(T, "word")
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: _plain(getattr(value, name)) for name in value.__dataclass_fields__})
    return value


def test_an_error_and_a_line_of_a_strangers_words() -> None:
    texts = [str(kind(T)) for kind in (NbguardError, SnapshotError, RankFactsError)] + [line_bundle(T)["text/plain"]]

    assert complaints([*texts, line_bundle(T)["text/html"]]) == []
    assert unescaped([line_bundle(T)["text/html"]]) == []
    assert not any("\n" in text for text in texts)


def test_letters_of_all_scripts_are_printed_as_they_are() -> None:
    text = "Größe 模型 модель نموذج ▏█▏ 1 × 2 → é 😀"

    assert printable(text) == text
    assert printable("a\nb\tc", "\n\t") == "a\nb\tc"


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", f"--{ESCAPES}\nforged"]) == 2

    told = capsys.readouterr().err
    assert complaints([told]) == []
    assert told.count("\n") == 1


def test_only_one_module_of_the_command_line_prints() -> None:
    printing = set()
    for file in Path(commands.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"):
                printing.add(file.name)

    assert printing == {"terminal.py"}  # progress has numbers only
