"""The JSON of every public result: its `kind` and field names stay what users read, whatever a class is called."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from nbguard.render.result import Result
from tests.render.results import EXAMPLES, RESULTS

SCHEMA = Path(__file__).parents[1] / "golden" / "json_schema.json"


def _schema(annotation: Any, within: tuple[type, ...] = ()) -> Any:
    """Return the shape of a type in JSON: fields by name, `[item]` for sequences, the types of Python for values."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if annotation in within:
            return annotation.__name__  # one in another: its fields stand above
        hints = typing.get_type_hints(annotation)
        return {
            field.name: _schema(hints[field.name], (*within, annotation))
            for field in dataclasses.fields(annotation)
            if field.metadata.get("json", True)
        }
    arguments = [a for a in typing.get_args(annotation) if a is not type(None) and a is not Ellipsis]
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return sorted(map(str, arguments))
    if origin in (tuple, list, frozenset):
        shapes = [_schema(argument, within) for argument in arguments]
        return [shapes[0]] if typing.get_args(annotation)[-1] is Ellipsis or origin is not tuple else {"tuple": shapes}
    if arguments:
        shapes = [_schema(argument, within) for argument in arguments]
        return shapes[0] if len(shapes) == 1 else {"any of": shapes}
    return getattr(annotation, "__name__", str(annotation))


def _shape(value: Any) -> Any:
    """Return the shape of JSON data, as `_schema` writes it: `[item]` for lists, whose items are taken together."""
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        shapes = list({json.dumps(_shape(item)): _shape(item) for item in value}.values())
        return shapes if len(shapes) < 2 else [{"any of": shapes}]
    return "None" if value is None else type(value).__name__


def _written(example: Result) -> Any:
    """Return the shape of a result's JSON: by its fields, or by an example where the result writes its JSON itself."""
    assert type(example).to_data is Result.to_data
    if not example.data:
        return _schema(type(example))
    return _shape({name: item for name, item in example.to_data().items() if name not in ("schema", "kind")})


def test_kinds_and_field_names_are_frozen(request: pytest.FixtureRequest) -> None:
    schema = {example.kind: _written(example) for example in sorted(EXAMPLES, key=lambda example: example.kind)}
    text = json.dumps(schema, indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        SCHEMA.write_text(text, encoding="utf-8")

    assert text == SCHEMA.read_text(encoding="utf-8")


def test_every_kind_is_told_apart() -> None:
    assert len({result.kind for result in RESULTS}) == len(RESULTS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_json_names_its_schema_and_kind_first(example: Result) -> None:
    data = example.to_data()

    assert list(data)[:2] == ["schema", "kind"]
    assert data["kind"] == example.kind
    assert json.loads(json.dumps(data))["kind"] == example.kind
