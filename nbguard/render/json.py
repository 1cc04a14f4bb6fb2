"""Results as JSON-ready data: bytes as ints, one schema number for all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

SCHEMA = 1


def fields_as_data(result: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain JSON-ready data; sizes in bytes.

    A field's metadata may say `json`: False where it is left out, or its name in JSON, which readers depend on.
    """
    named = ((field.metadata.get("json", field.name), field.name) for field in dataclasses.fields(result))
    return {shown: _plain(getattr(result, name)) for shown, name in named if shown}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_as_data(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value


def to_json(data: dict[str, Any]) -> str:
    """Return plain data as JSON text."""
    return json.dumps(data, indent=1, ensure_ascii=False)
