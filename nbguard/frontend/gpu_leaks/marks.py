"""Sizes that the user gives, on the command line and in marks. A wrong one is an error of usage, in one line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nbguard.units import parse_bytes

_NAMES = ("peak", "keeps")


@dataclass(frozen=True, slots=True)
class MemoryAllowance:
    """The bytes that `@pytest.mark.gpu_memory(...)` allows a test. A limit that it does not give is None."""

    peak: int | None = None  # most that its tensors may take at a time
    keeps: int | None = None  # that it may leave


def size_of(size: object, where: str) -> int:
    """Return a size in bytes. Raises pytest.UsageError on a text or value that is not a size."""
    try:
        if isinstance(size, str):
            return parse_bytes(size)
    except ValueError as error:
        raise pytest.UsageError(f"{where}: {error}") from None
    raise pytest.UsageError(f"{where}: {type(size).__name__} is not a size; write it as '2GiB'")


def allowance_of(item: pytest.Item) -> MemoryAllowance:
    """Return the allowance of the nearest mark of a test. Raises pytest.UsageError if the mark cannot be used."""
    mark = item.get_closest_marker("gpu_memory")
    if mark is None:
        return MemoryAllowance()
    where = f"{item.nodeid}: gpu_memory"
    if mark.args or not mark.kwargs or not mark.kwargs.keys() <= {*_NAMES}:
        raise pytest.UsageError(f"{where} takes peak= and keeps=, such as gpu_memory(peak='2GiB')")
    return MemoryAllowance(**{name: size_of(size, f"{where}({name}=)") for name, size in mark.kwargs.items()})
