"""The storages of the tensors that lived when a profile began, and those of them that a fit freed, or made its own."""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.walk import weak_storage


class OlderStorages:
    """Holds each storage by torch's own weak reference, which keeps no memory of a device alive."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, int, Any]] = {}  # by address: device, bytes, weak reference
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        autograd = Autograd()
        for tensor in Kinds().tracked({"tensor"}):
            gradient = autograd.grad(tensor) if autograd.is_leaf(tensor) else None
            for owner in (tensor,) if gradient is None else (tensor, gradient):
                try:
                    storage = autograd.storage(owner)
                    key, nbytes, device = storage.data_ptr(), storage.nbytes(), str(storage.device)
                except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and wrappers have no storage
                    continue
                if nbytes and key not in self._held:
                    self._held[key] = device, nbytes, weak_storage(storage)

    def spent(self, device: str, rounding: int, owned: Container[int]) -> int:
        """Return the bytes on a device that were freed since, or that the storages at the addresses `owned` have."""
        return sum(
            -(-nbytes // rounding) * rounding
            for key, (where, nbytes, weak) in self._held.items()
            if where == device and (key in owned or weak.expired())
        )
