"""The environment in which a process finds the fake libraries instead of CUDA's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.fake_cuda.build import library

DEVICE_NAME = "Fake CUDA GPU"
CONTEXT_BYTES = 400 * 1024**2
"""What a context takes by default here. On a real device it is some hundreds of MiB too, and differs from one to the next."""


def environment(settings: Mapping[str, str] | None = None, folder: Path | None = None) -> dict[str, str]:
    """Return this process's environment changed so that a child runs on the fake device.

    PyTorch looks for CUDA beside itself first, so the libraries must be there before it asks: preloaded, and by bare name,
    as a preloaded path would not match the name that is asked for. `settings` are FAKE_CUDA_* and further variables.
    """
    found = folder or library()
    sonames = (found / "sonames").read_text().split()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FAKE_CUDA_", "CUDA_VISIBLE_"))}
    return {
        **inherited,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(found), os.environ.get("LD_LIBRARY_PATH")))),
        "LD_PRELOAD": os.pathsep.join(filter(None, (*sonames, os.environ.get("LD_PRELOAD")))),
        "FAKE_CUDA_CONTEXT_BYTES": str(CONTEXT_BYTES),
        **(settings or {}),
    }
