"""Autocast as it is on this thread."""

from __future__ import annotations

from typing import Any


def autocast_dtypes(torch: Any) -> dict[str, Any]:
    """Return the types in which autocast computes from here on, by the kind of device; none where it is off.

    These are flags of the thread: no device is opened to read them.
    """
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)}
