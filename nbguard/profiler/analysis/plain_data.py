"""Frozen dataclasses of a profile as plain data for JSON; `nbguard.plain_data` reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nbguard.plain_data import COLUMNS, ROWS
from nbguard.profiler.analysis.time.packed_log import pack_log
from nbguard.profiler.analysis.time.phase_log import PhaseLog


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it. A tuple of dataclasses becomes a table: its columns once, a row for each."""
    if type(value) is PhaseLog:
        return pack_log(value)
    if type(value) is float and not math.isfinite(value):
        return str(value)
    if type(value) is tuple:
        if value and dataclasses.is_dataclass(value[0]):
            names = [field.name for field in dataclasses.fields(value[0])]
            return {COLUMNS: names, ROWS: [[to_plain(getattr(item, name)) for name in names] for item in value]}
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
