"""Columns and elements of pandas' tables, with the reference that `del` takes away, read from pandas' own blocks."""

from __future__ import annotations

import sys
from typing import Any

from nbguard.memory.scan.heap.kinds import attributes_of, loaded_class

_LABELS = frozenset({"string", "integer"})
"""Kinds of labels that are compared without code of the user's."""
_HERE = 3
"""References to an array that only its block has, while this reads it: the block's, a variable's and an argument's."""


def part_of_table(table: Any, key: object) -> tuple[Any, tuple[Any, ...]] | None:
    """Return (object, its container) of the reference that `del table[key]` takes away; None where none is known.

    pandas keeps columns of a kind in one block, which stays until the last of them goes. An element goes as its column is
    copied, which frees it where nothing else has the array.
    """
    kinds = (loaded_class("pandas", "DataFrame"), loaded_class("pandas", "Series"))
    manager: Any = (attributes_of(table) or {}).get("_mgr") if type(table) in kinds else None
    if manager is None or type(key) not in (str, int):
        return None
    try:
        labels, blocks = manager.axes[0], manager.blocks
        if labels.inferred_type not in _LABELS or not labels.is_unique or key not in labels:
            return None
        place = labels.get_loc(key)
        if type(table) is kinds[0]:
            block = next(block for block in blocks if place in block.mgr_locs)
            return (block, (blocks,)) if len(block.mgr_locs) == 1 else None
        values: Any = blocks[0].values
        kind: type = type(values)
        if (
            kind is not loaded_class("numpy", "ndarray")
            or values.base is not None
            or values.dtype.kind != "O"
            or sys.getrefcount(values) != _HERE
        ):
            return None
        value = values[place]
        return (value, (values,)) if sum(other is value for other in values) == 1 else None
    except AttributeError:  # another pandas
        return None
