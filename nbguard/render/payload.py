"""Reports as JSON-ready data: bytes as ints, one schema number for all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

SCHEMA = 1


def payload(result: Any, kind: str) -> dict[str, Any]:
    """Return a result as plain JSON-ready data; sizes in bytes. `kind` names the result for readers of the JSON."""
    fields = {field.name: _plain(getattr(result, field.name)) for field in dataclasses.fields(result)}
    return {"schema": SCHEMA, "kind": kind, **fields}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value


def to_json(data: dict[str, Any]) -> str:
    """Return plain data, as from `payload`, as JSON text."""
    return json.dumps(data, indent=1, ensure_ascii=False)
