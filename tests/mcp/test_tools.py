"""The tools and their schemas, and reading their arguments."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from nbguard.frontend.mcp.tools import TOOLS, OomArguments, ToolError, input_schema, output_schema, read_arguments, tool_named

NEEDED = {"why": {"name": "x"}, "release": {"token": "x"}, "lint": {"files": ["x"]}}


@pytest.mark.parametrize("name", TOOLS)
def test_schemas_are_valid_and_describe_every_argument(name: str) -> None:
    tool = TOOLS[name]
    asked, answered = input_schema(tool), output_schema(tool)

    for schema in (asked, answered):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
    assert all(each["description"] for each in asked["properties"].values())
    assert asked["required"] == list(NEEDED.get(name, {}))


@pytest.mark.parametrize("name", TOOLS)
def test_what_the_schema_takes_is_read_and_nothing_else(name: str) -> None:
    schema = input_schema(TOOLS[name])
    needed: dict[str, Any] = NEEDED.get(name, {})

    jsonschema.validate(needed, schema)
    read_arguments(name, needed)
    for more in ({"code": "print()"}, *({each: {"a": 1}} for each in schema["properties"])):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**needed, **more}, schema)
        with pytest.raises(ToolError, match=f"{name} cannot be called so"):
            read_arguments(name, {**needed, **more})


def test_a_document_of_each_kind_alone_is_taken_where_there_are_several() -> None:
    schema = output_schema(TOOLS["release"])

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 1, "kind": "report"}, schema)


@pytest.mark.parametrize(
    "arguments", [{"settings": "expandable_segments:True"}, {"file": None}, {"file": ["a"]}, [], None, "x"]
)
def test_arguments_of_another_type_are_refused(arguments: Any) -> None:
    with pytest.raises(ToolError):
        read_arguments("explain_oom", arguments)


def test_arguments_are_as_given() -> None:
    asked = read_arguments("explain_oom", {"file": "a.pickle", "settings": ["", "expandable_segments:True"]})

    assert asked == OomArguments(file="a.pickle", settings=("", "expandable_segments:True"))


def test_a_tool_that_is_not_there_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ToolError, match="there is no tool 'who_hold': did you mean who_holds"):
        tool_named("who_hold")
    with pytest.raises(ToolError, match="there are kernels, "):
        tool_named("__import__('os').system('x')")
