"""The schemas of all JSON that nbguard writes, made from the types of its results; python docs/make_schemas.py writes them.

A file of `nbguard/schemas` is a JSON Schema (draft 2020-12) of the documents of one `kind`. Fields are described by the
comments beside them in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

from nbguard.plain_data import Within
from nbguard.render.result import SCHEMA, Result

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "nbguard" / "schemas"

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_FIELD = re.compile(r"^    (\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)


def results() -> list[type[Result]]:
    """Return the class of every public result, by kind."""
    for file in sorted((ROOT / "nbguard").rglob("*.py")):
        if "(Result)" in file.read_text(encoding="utf-8"):
            import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return sorted((result for result in Result.__subclasses__() if "kind" in vars(result)), key=lambda result: result.kind)


def document(result: type[Result]) -> dict[str, Any]:
    """Return the schema of the documents of one result."""
    definitions = _Definitions()
    shape = definitions.document(result)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nbguard:{SCHEMA}:{result.kind}",
        **shape,
        **({"$defs": dict(sorted(definitions.shapes.items()))} if definitions.shapes else {}),
    }


class _Definitions:
    """The shapes of the classes that stand in a document, by name."""

    def __init__(self) -> None:
        self.shapes: dict[str, dict[str, Any]] = {}

    def document(self, result: type[Result]) -> dict[str, Any]:
        """Return the shape of a result's own JSON: its fields after `schema` and `kind`."""
        fields = typing.get_type_hints(_resolved(result.data))["return"] if result.data else result
        shape = self._object(fields, result)
        marks = {"schema": {"const": SCHEMA}, "kind": {"const": result.kind}}
        return {**shape, "properties": {**marks, **shape["properties"]}, "required": [*marks, *shape["required"]]}

    def of(self, annotation: Any) -> dict[str, Any]:
        """Return the shape of a type in JSON."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if annotation in _PLAIN:
            return {"type": _PLAIN[annotation]}
        if origin is typing.Annotated:
            if isinstance(arguments[1], Within):
                return self.of(arguments[0])
            return self._named(arguments[1], is_document=issubclass(arguments[1], Result))
        if origin in (typing.Union, types.UnionType):
            return _either([self.of(argument) for argument in arguments])
        if origin is typing.Literal:
            return {"enum": sorted(arguments)}
        if origin is tuple and arguments[-1] is not Ellipsis:
            count = len(arguments)
            return {"type": "array", "prefixItems": [self.of(each) for each in arguments], "minItems": count, "maxItems": count}
        if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
            return {"enum": [member.value for member in annotation]}
        if origin in (tuple, list, frozenset):
            return {"type": "array", "items": self.of(arguments[0])}
        if dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation):
            return self._named(annotation)
        raise TypeError(f"{annotation} has no shape in JSON")

    def _named(self, cls: Any, *, is_document: bool = False) -> dict[str, Any]:
        """Return a reference to the shape of a class, which is made once."""
        name = f"{cls.__name__}Document" if is_document else cls.__name__
        if name not in self.shapes:
            self.shapes[name] = {}  # one in another refers to it
            self.shapes[name] = self.document(cls) if is_document else self._object(cls, cls)
        return {"$ref": f"#/$defs/{name}"}

    def _object(self, cls: Any, described: Any) -> dict[str, Any]:
        hints, comments = typing.get_type_hints(cls, include_extras=True), _comments(cls)
        if typing.is_typeddict(cls):
            names, required = dict(zip(hints, hints, strict=True)), [name for name in hints if name in cls.__required_keys__]
        else:
            fields = dataclasses.fields(cls)
            names = {shown: field.name for field in fields if (shown := field.metadata.get("json", field.name))}
            required = list(names)
        properties = {shown: self.of(hints[name]) | _described(comments.get(name, "")) for shown, name in names.items()}
        about = _described(inspect.cleandoc(described.__doc__ or "").partition("\n\n")[0].replace("\n", " "))
        return {**about, "type": "object", "properties": properties, "required": required}


def _resolved(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _described(text: str) -> dict[str, str]:
    return {"description": text} if text else {}


def _either(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shape of what has one of several: a list of types where they are plain."""
    if all(set(shape) == {"type"} for shape in shapes):
        return {"type": [shape["type"] for shape in shapes]}
    return {"anyOf": shapes}


def _comments(cls: Any) -> dict[str, str]:
    """Return the comments beside the fields of a class."""
    source = inspect.getsource(cls)
    node = ast.parse(textwrap.dedent(source)).body[0]
    named = reversed(node.bases if isinstance(node, ast.ClassDef) else [])
    # A TypedDict has its bases in its source alone before Python 3.12.
    bases = [getattr(sys.modules[cls.__module__], base.id) for base in named if isinstance(base, ast.Name)]
    own = [base for base in bases if inspect.isclass(base) and base.__module__.startswith("nbguard.") and base is not Result]
    return {name: text for part in (*map(_comments, own), dict(_FIELD.findall(source))) for name, text in part.items()}


def text(result: type[Result]) -> str:
    """Return the file of one result."""
    return json.dumps(document(result), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all schemas, and remove those of kinds that are no more."""
    FOLDER.mkdir(exist_ok=True)
    texts = {f"{result.kind}.json": text(result) for result in results()}
    for file in FOLDER.glob("*.json"):
        if file.name not in texts:
            file.unlink()
    for name, written in texts.items():
        (FOLDER / name).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
