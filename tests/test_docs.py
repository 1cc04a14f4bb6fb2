"""What the documents say about the repository is there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.programs import docs_program

ROOT = Path(__file__).parents[1]

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "tests/fake_cuda/README.md",
    *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "docs").rglob("*.md"))),
)

# A path that begins with a folder of the repository, and perhaps a name in that file: `nbguard/api.py:report`.
_PATH = re.compile(r"`((?:nbguard|tests|docs|labextension|notebooks|\.ci|\.github)/[\w./-]+)(?::(\w+))?`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_MADE = ("nbguard/labextension", "nbguard/frontend/notebook/static", "tests/data/gpu")
"""Folders that a build or a GPU day makes."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_name_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = [(path.rstrip("/"), name) for path, name in _PATH.findall(text) if not path.startswith(_MADE)]

    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    assert [f"{path}:{name}" for path, name in named if name and name not in names_in(ROOT / path)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file(document: str) -> None:
    file = ROOT / document
    links = _LINK.findall(file.read_text(encoding="utf-8"))

    assert [link for link in links if not (file.parent / link).exists()] == []


def names_in(file: Path) -> set[str]:
    """Return the functions, methods and classes of a Python file."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, definitions)}


def test_the_picture_of_the_rooms_is_current() -> None:
    """To make it anew: python docs/make_rooms.py."""
    rooms = docs_program("make_rooms")

    assert rooms.PAGE.read_text(encoding="utf-8") == rooms.page()
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture()


def test_every_room_has_a_row_for_those_who_are_new() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package, wings = ROOT / "nbguard", docs_program("make_rooms").WINGS
    files = [*package.glob("*/*"), *(file for wing in wings for file in (package / wing).glob("*/*"))]
    rooms = {file.parent.relative_to(ROOT).as_posix() for file in files if file.suffix in (".py", ".json")}

    homes = {"nbguard/labextension", *(f"nbguard/{wing}" for wing in wings)}
    assert [room for room in sorted(rooms - homes) if f"| `{room}`" not in page] == []


def test_every_result_stands_in_the_reference_with_all_of_its_fields() -> None:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

    for file in sorted((ROOT / "nbguard" / "schemas").glob("*.json")):
        fields = json.loads(file.read_text(encoding="utf-8"))["properties"]
        untold = [name for name, field in fields.items() if not field.get("description")]
        assert untold == ["schema", "kind"], f"{file.name}: a comment at the field in the source says what it is, and its unit"
        assert f"<!-- fields: {file.stem} -->" in reference


def test_the_page_of_complaints_is_current_and_each_wish_is_in_it_once() -> None:
    """To make it anew: python docs/make_complaints.py. That each test is there, all documents are asked."""
    program = docs_program("make_complaints")
    complaints = [each for of_section in program.sections().values() for each in of_section]

    assert program.PAGE.read_text(encoding="utf-8") == program.page()
    assert sorted(number for each in complaints for number in each.wishes) == list(range(1, program.WISHES + 1))
    assert [each.words for each in complaints if (each.state == "●") == bool(each.lacking)] == []
