"""A build hook of hatchling that says in one line what to do where the browser's files need Node.js and there is none."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NOT_BUILT = (
    "nbguard: a checkout has no built browser files, and npm is not here to build them. Run `make build`, which brings its own "
    "Node.js, and install dist/nbguard-*.whl; or install Node.js 20.19 or newer, and run the same command again."
)
_EDITABLE = (
    "nbguard: npm is not here to build the browser files again. To take those that are there: "
    "SKIP_JUPYTER_BUILDER=1 pip install --editable ."
)


class NodeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Ends the build, without a traceback, if the hook that comes next would look for npm in vain."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Look for what the build needs; `built` in pyproject.toml names the files that make npm unnecessary."""
        if shutil.which("npm") is not None or os.getenv("SKIP_JUPYTER_BUILDER"):
            return
        if not all(Path(self.root, name).exists() for name in self.config["built"]):
            sys.exit(_NOT_BUILT)
        if version == "editable":
            sys.exit(_EDITABLE)
