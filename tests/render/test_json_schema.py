"""The JSON of every public result is as its published schema says, and the schemas are as the types say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nbguard.frontend.cli import main
from nbguard.render.result import Result
from tests.cli.test_files import snapshot_file
from tests.programs import docs_program
from tests.render.results import EXAMPLES, RESULTS

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "nbguard" / "schemas"
KINDS = sorted(file.stem for file in SCHEMAS.glob("*.json"))


def closed(schema: Any) -> Any:
    """Return a schema under which an object has no field that the schema does not know."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {name: closed(part) for name, part in schema.items()}
    return inside | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else inside


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(closed(json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8"))))


def mistakes(data: Any) -> list[str]:
    """Return where a document is not as the schema of its kind says."""
    return [f"{error.json_path}: {error.message}" for error in validator(data["kind"]).iter_errors(data)]


def test_the_schemas_are_as_the_types_say() -> None:
    """To make them anew: python docs/make_schemas.py. A field that goes, or is renamed, breaks those who read it."""
    maker = docs_program("make_schemas")
    made = {result.kind: maker.text(result) for result in maker.results()}

    assert made == {kind: (SCHEMAS / f"{kind}.json").read_text(encoding="utf-8") for kind in KINDS}


def test_every_kind_has_a_schema_and_an_example() -> None:
    assert sorted(result.kind for result in RESULTS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_one(kind: str) -> None:
    Draft202012Validator.check_schema(json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_json_is_as_its_schema_says(example: Result) -> None:
    assert type(example).to_data is Result.to_data
    data = json.loads(json.dumps(example.to_data()))

    assert list(data)[:2] == ["schema", "kind"]
    assert mistakes(data) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_json_without_a_field_or_with_another_is_not(example: Result) -> None:
    data = json.loads(json.dumps(example.to_data()))
    field = list(data)[-1]

    assert mistakes({name: value for name, value in data.items() if name != field})
    assert mistakes(data | {"more": 1})
    assert mistakes(data | {field: {"another": "type"}})


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["diagnose", "FILE"], "snapshot_diagnosis"),
        (["map", "FILE"], "memory_map"),
        (["diff", "FILE", "FILE"], "diff"),
        (["replay", "FILE"], "replay"),
        (["whatif", "FILE", "--set", "expandable_segments:True"], "device_whatif"),
        (["gpus"], "gpus"),
    ],
)
def test_commands_print_what_their_schema_says(
    arguments: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(snapshot_file(tmp_path, "2.13.0_118"))

    main([*(file if word == "FILE" else word for word in arguments), "--json"])
    data = json.loads(capsys.readouterr().out)

    assert (data["schema"], data["kind"]) == (1, kind)
    assert mistakes(data) == []


def test_the_command_line_prints_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out.split() == KINDS
    assert main(["schema", "memory_map"]) == 0
    assert capsys.readouterr().out == (SCHEMAS / "memory_map.json").read_text(encoding="utf-8")
    assert main(["schema", "../gpus"]) == 2
    assert "nbguard: there is no kind '../gpus'" in capsys.readouterr().err
