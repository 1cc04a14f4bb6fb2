"""CUDA toolkits and the C++ compiler that extensions of PyTorch would be built with here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from nbguard.training.doctor.analysis.environment import CompilerFacts, Toolkit, ToolkitFacts

_PATIENCE = 3  # seconds for a compiler to say its version
_HEADER = "cuda_runtime.h"
_NEWEST = 30
"""A major version of GCC beyond those that may be installed."""


def toolkit_facts(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> ToolkitFacts:
    """Return the toolkits of a machine, by PyTorch's own rule of choice. `root` is another place for /usr/local.

    Versions are read from the toolkits' files; a compiler without one is asked `--version`. Without a toolkit none is run.
    """
    path = variables.get("PATH", "")
    given = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=path)
    beside = root / "usr/local/cuda"
    found = Path(nvcc).parents[1] if nvcc else beside if beside.exists() else None
    home = Path(given) if given else found
    if home is None:
        return ToolkitFacts()
    others = sorted((root / "usr/local").glob("cuda-*"), reverse=True)
    places = [home, *([found] if found else []), *(place for place in others if (place / "bin/nvcc").is_file())]
    return ToolkitFacts(
        toolkits=tuple(_toolkit(place) for place in dict.fromkeys(places)),
        is_given=bool(given),
        compiler=_compiler(variables.get("CXX") or "c++", path),
        numbered=tuple(number for number in range(_NEWEST, 8, -1) if shutil.which(f"g++-{number}", path=path)),
    )


def _toolkit(home: Path) -> Toolkit:
    nvcc = home / "bin/nvcc"
    headers = [home / "include", *home.glob("targets/*/include")]
    limit = next(filter(None, (_newest_gcc(folder) for folder in headers)), None)
    return Toolkit(
        home=str(home),
        has_nvcc=nvcc.is_file(),
        has_headers=any((folder / _HEADER).is_file() for folder in headers),
        version=(_written(home) or _said(nvcc)) if nvcc.is_file() else None,
        newest_gcc=limit,
    )


def _written(home: Path) -> tuple[int, ...] | None:
    """Return the version of nvcc that a toolkit's own file tells."""
    try:
        parts = json.loads((home / "version.json").read_bytes())
        text = (parts.get("cuda_nvcc") or parts["cuda"])["version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return _numbers(str(text))


def _said(nvcc: Path) -> tuple[int, ...] | None:
    release = re.search(r"release (\d+\.\d+)", _output(str(nvcc)))
    return _numbers(release[1]) if release else None


def _newest_gcc(folder: Path) -> int | None:
    """Return the newest major version of GCC that a toolkit takes: its header refuses others by this comparison."""
    for name in ("crt/host_config.h", "host_config.h"):
        try:
            refuses = re.search(r"#\s*if\s+__GNUC__\s*>\s*(\d+)", (folder / name).read_text(errors="replace"))
        except OSError:
            continue
        if refuses:
            return int(refuses[1])
    return None


def _compiler(name: str, path: str) -> CompilerFacts | None:
    words = name.split()
    found = shutil.which(words[-1], path=path) if words else None  # "ccache g++"
    if found is None:
        return None
    line = next(iter(_output(found).splitlines()), "")
    versions = list(_versions(line))
    return CompilerFacts(path=found, is_gcc="clang" not in line, version=versions[-1] if versions else None)


def _versions(line: str) -> Iterator[tuple[int, ...]]:
    for text in re.findall(r"\d+(?:\.\d+)+", line):
        numbers = _numbers(text)
        if numbers:
            yield numbers


def _numbers(text: str) -> tuple[int, ...] | None:
    digits = re.match(r"\d{1,6}(?:\.\d{1,6})*", text)
    return tuple(map(int, digits[0].split("."))) if digits else None


def _output(program: str) -> str:
    try:
        run = subprocess.run(  # noqa: S603 - a compiler that is asked for its version
            [program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.decode(errors="replace")
