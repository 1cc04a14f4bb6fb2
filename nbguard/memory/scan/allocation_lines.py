"""The user's lines that allocate storages, noted while code runs, to explain the memory that each round of an action leaves.

A dispatch mode sees every operation of its thread. On CUDA the allocator's own history, where it is recorded, tells the same
without one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbguard.memory.scan.devices.allocation_sites import Sites, stack_of

_DEEPEST = 50
"""Frames that are looked through for one of the user's."""


class AllocationLines(TorchDispatchMode):  # type: ignore[misc]
    """Notes, while entered, the line that made each storage, by (device, address). It keeps no tensor alive."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int], str] = {}
        self._sites = Sites()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and note the storages that it allocated."""
        del types
        given = set(_storages((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        made = [key for key in _storages(result) if key not in given]
        if made:
            line = self._sites.of(stack_of(sys._getframe(1), _DEEPEST))
            self.lines.update(dict.fromkeys(made, line))
        return result


def _storages(values: Any) -> Iterator[tuple[str, int]]:
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            yield str(storage.device), storage.data_ptr()
