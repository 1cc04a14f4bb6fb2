"""Every public result shows itself, in every back end, whatever the names in it are."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

import nbguard
from nbguard.render.html import FactLines, Line, Listing, Picture, Section, Table, TableRow, blocks_html
from nbguard.render.markup import Html, join, tag, with_code
from nbguard.render.result import Result
from nbguard.render.text import blocks_text
from tests.render.results import EXAMPLES, RESULTS
from tests.render.test_render import _golden, _parsed

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a\x1b[31m\u202e\nb", "o'k`x`&amp;", "long " * 400]
_by_kind = [pytest.param(example, id=example.kind) for example in EXAMPLES]


def test_every_result_in_the_package_has_an_example() -> None:
    root = Path(nbguard.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    derived = {each.name for each in classes if any(isinstance(b, ast.Name) and b.id == "Result" for b in each.bases)}

    assert derived == {result.__name__ for result in RESULTS}


@pytest.mark.parametrize("result", _by_kind)
def test_a_result_at_the_end_of_a_cell_shows_itself(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbguard.texts.running_shell", object)
    data, _ = DisplayFormatter().format(result)

    assert data == result.mimebundle()
    assert set(data) == {"text/plain", "text/html"}
    assert data["text/plain"].strip()
    assert str(result) == data["text/plain"]
    assert type(data["text/html"]) is str


@pytest.mark.parametrize(
    ("name", "rooms"),
    [
        ("doctor.txt", {"doctor"}),
        ("ranks.txt", {"ranks", "cluster"}),
        ("runs.txt", {"runs"}),
        ("snapshots.txt", {"snapshots"}),
        ("cleanup.txt", {"cleanup"}),
        ("notices.txt", {"reports"}),
    ],
)
def test_golden_text_of_the_examples_of_a_room(name: str, rooms: set[str], request: pytest.FixtureRequest) -> None:
    """The wording of these rooms is pinned here. Their other tests go by kinds, commands and bytes."""
    kinds = {"notices", "rounds"} if name == "notices.txt" else None
    shown = [each for each in EXAMPLES if type(each).__module__.split(".")[2] in rooms]
    texts = [each.mimebundle()["text/plain"] for each in shown if kinds is None or each.kind in kinds]

    assert texts
    _golden(name, "\n\n".join(texts), request)


@pytest.mark.parametrize("result", _by_kind)
def test_where_there_are_no_magics_it_says_the_same_with_calls(result: Result) -> None:
    command, call = r"%(?:gpumem|reset_gpu|nbguard)\S*", r"(?:repeat = )?nbguard\.\w+\([^)]*\)"

    shown = result._repr_mimebundle_()

    assert str(result) == (shown if isinstance(shown, dict) else shown[0])["text/plain"]
    assert not re.search(r"%(?:gpumem|reset_gpu)\b(?! (?:history|cells|simulate|--engines))", str(result))
    assert len(re.findall(call, str(result))) <= len(re.findall(command, result.mimebundle()["text/plain"]))


@pytest.mark.parametrize("result", _by_kind)
def test_a_result_stays_a_frozen_value(result: Result) -> None:
    assert repr(result).startswith(f"{type(result).__name__}(")
    assert result == dataclasses.replace(result)  # type: ignore[type-var]
    assert not hasattr(result, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, dataclasses.fields(result)[0].name, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", _by_kind)
def test_json_names_its_kind_first(result: Result) -> None:
    data = result.json_bundle()["application/json"]

    assert list(data)[:2] == ["schema", "kind"]
    assert data["kind"] == result.kind
    assert json.loads(json.dumps(data)) == json.loads(result.json_bundle()["text/plain"])


@pytest.mark.parametrize("result", _by_kind)
def test_html_has_the_figures_of_the_text(result: Result) -> None:
    bundle = result.mimebundle()
    words = " ".join(" ".join(_parsed(bundle["text/html"]).words).split())

    figures = re.findall(r"[\d.]+ [KMG]iB", bundle["text/plain"])
    assert all(figure in words for figure in figures)


def _renamed(value: Any, name: str) -> Any:
    """Return a result in which every text that is not one of a few fixed words is `name`."""
    if isinstance(value, str):
        return name
    if isinstance(value, tuple):
        return tuple(_renamed(each, name) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        free = [
            field.name for field in dataclasses.fields(value) if field.init and not _is_fixed(field.name, hints[field.name])
        ]
        return dataclasses.replace(value, **{each: _renamed(getattr(value, each), name) for each in free})  # type: ignore[type-var]
    return value


def _is_fixed(name: str, hint: Any) -> bool:
    """Say whether a field has words that nobody's code can choose, or a value with rules of its own."""
    return "Literal" in str(hint) or name in {"kind", "tracked", "graph", "settings", "replay", "verdict"}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("result", _by_kind)
def test_no_name_gets_out_of_its_place(result: Result, name: str) -> None:
    bundle = _renamed(result, name).mimebundle()

    page = _parsed(bundle["text/html"])
    assert not page.tags & {"script", "img"}
    assert "<script>" not in bundle["text/html"].replace("&lt;script&gt;", "")
    assert all(character.isprintable() or character == "\n" for character in bundle["text/plain"])
    shown = re.sub("<style>.*?</style>", "", bundle["text/html"], flags=re.DOTALL)
    assert all(character.isprintable() for character in shown)
    assert max(map(len, bundle["text/plain"].splitlines())) < 2_500


def test_text_becomes_html_only_by_being_escaped() -> None:
    name = "<b>&\"'"
    escaped = "&lt;b&gt;&amp;&quot;&#x27;"

    assert Html(name) == escaped
    assert Html(Html(name)) == escaped
    assert tag("i", name, Html(name), title=name) == f'<i title="{escaped}">{escaped}{escaped}</i>'
    assert join([name, tag("i")]) == f"{escaped}<i></i>"
    assert with_code("`<a>` & <b>") == "<code>&lt;a&gt;</code> &amp; &lt;b&gt;"
    assert type(Html(name) + "<b>") is str  # and so is escaped again where it is used
    assert tag("path", d="M0 0", class_="x", fill=None) == '<path d="M0 0" class="x"/>'


def test_blocks_stand_close_or_apart() -> None:
    rows = (TableRow(cells=("a", "1", "")), TableRow(cells=("bb", "22", "")))
    blocks = [
        Section("cuda:0", "GPU", "1 B"),
        Line("one"),
        Table(rows=rows, figures=(1,)),
        FactLines((("word", "`code` stands"),)),
        Table(rows=rows, names=("name", "bytes", "empty"), figures=(1,), code=(0,)),
        Listing(sentences=("last",), mark="•"),
        Picture(tag("svg"), ("  drawn",)),
    ]

    assert blocks_text(blocks).splitlines() == [
        "cuda:0  GPU  1 B",
        "  one",
        "  a    1",
        "  bb  22",
        "  word         code stands",
        "",
        "  name   bytes",
        "  a          1",
        "  bb        22",
        "",
        "  • last",
        "  drawn",
    ]
    html = blocks_html(blocks, "a label")
    assert isinstance(html, Html)
    assert 'aria-label="a label"' in html
    assert "<code>bb</code>" in html
    assert "empty" not in html.partition("</style>")[2]
