"""Placeholders for released objects, as a debugger shows them, with a description and the values of a device's tensor."""

from __future__ import annotations

import sys
from typing import Any

from nbguard.memory.core.advice import release_stale
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.unread import Unread
from nbguard.memory.scan.objects.describe import describe
from nbguard.texts import form, here

BUDGET = 256 * 1024**2
"""Bytes of host memory that one cleanup may spend on values."""


class Placeholder:
    """Stands for an object that a cleanup released. `value` is a copy of a tensor on the host, or None."""

    __slots__ = ("value", "what")

    def __init__(self, what: str, value: Any = None) -> None:
        self.what = what
        self.value = value

    def __repr__(self) -> str:
        values = "" if self.value is None else "; its values: .value"
        return f"<released by %reset_gpu: {self.what}{values}>"

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__ or name.startswith("__"):  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        values = "" if self.value is None else "; its values are in .value"
        command = release_stale().command
        raise AttributeError(f"there is no {name} any more: {form(command, here())} released this {self.what}{values}")


class Placeholders:
    """Makes placeholders, within a budget of host memory: a tensor that still fits is copied, once for all frames.

    Keeps the objects it was given until it goes itself, so that no id is met twice.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._left = budget
        self._kinds = Kinds()
        self._made: dict[int, tuple[Any, Placeholder]] = {}

    def of(self, value: Any) -> Placeholder:
        """Return the placeholder of `value`."""
        if id(value) not in self._made:
            self._made[id(value)] = value, Placeholder(describe(value, self._kinds, Unread()), self._copy(value))
        return self._made[id(value)][1]

    def _copy(self, value: Any) -> Any:
        """Return a copy of a device's tensor on the host, if that takes no memory of the device.

        Not of a host tensor: that would give back nothing.
        """
        if self._kinds.of(type(value)) != "tensor":
            return None
        torch: Any = sys.modules["torch"]
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                plain = torch.Tensor.detach(value)
                nbytes = plain.nbytes
                if plain.device.type in ("cpu", "meta") or nbytes > self._left or not plain.is_contiguous():
                    return None
                copy = plain.cpu()
        except Exception:  # noqa: BLE001 - a device that fails every call, a subclass without storage: then there are no values
            return None
        self._left -= nbytes
        return copy
