"""The bytes of the tensors that names are bound to, without those of their storages that they do not show."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def named_tensors(namespace: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each plain tensor with a name; one of a subclass is not asked, which may run code of the user's."""
    torch: Any = sys.modules["torch"]
    return {
        name: value.numel() * value.element_size()
        for name, value in list(namespace.items())
        if type(value) is torch.Tensor and value.layout is torch.strided
    }
