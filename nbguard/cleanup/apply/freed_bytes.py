"""What steps gave back beside the storages that a plan counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Gains:
    """Bytes of the device (workspaces of libraries) and of the host (workers, pinned memory), added up step by step."""

    device: int = 0
    host: int = 0
