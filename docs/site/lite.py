"""The page on which nbguard can be tried, a JupyterLite with a notebook and recordings: lite.py SITE.

It takes Python from the page that reads snapshots (`snapshot_doctor.py`), so that one comes first.
"""

from __future__ import annotations

import email
import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from archives import write_archive
from jupyter_core.paths import jupyter_path
from packaging.requirements import Requirement

_DOCS = Path(__file__).resolve().parents[1]
_ROOT = _DOCS.parent
_SOURCES = _DOCS / "lite"
_WHEELS = _SOURCES / "wheels.txt"
_RECORDING = _ROOT / "notebooks" / "out_of_memory.pickle"
_KEPT = _ROOT / "build" / "lite"
"""Where wheels stay for the next time."""
_PYTHON = "snapshot-doctor/pyodide"
"""Where a site has the files of npm's package `pyodide`."""
_LOCK = "pyodide-lock.json"

_EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
"""Extensions of the page, of all that may be installed here."""
_KERNEL_WHEEL = "jupyterlite_pyodide_kernel-*.whl"
_KERNEL_EXTENSION = "*.data/data/share/jupyter/labextensions/@jupyterlite/pyodide-kernel-extension"
_BUILD = {
    "apps": ["notebooks"],
    "contents": ["contents"],
    "ignore_sys_prefix": ["federated_extensions"],
    "no_sourcemaps": True,
    "no_unused_shared_packages": True,
}
_KERNEL = {
    # An address is relative to the page's folder only if it begins with a dot and a slash.
    "pyodideUrl": f"./../{_PYTHON}/pyodide.mjs",
    "disablePyPIFallback": True,
    # What is named here is there when the first cell runs, so no cell installs anything.
    "loadPyodideOptions": {"lockFileURL": f"./wheels/{_LOCK}", "packages": ["comm", "ipython", "jedi", "micropip", "nbguard"]},
}
_PAGE = {
    "jupyter-lite-schema-version": 0,
    "jupyter-config-data": {
        "appName": "nbguard",
        "appUrl": "./notebooks",
        "disabledExtensions": ["@jupyterlab/apputils-extension:announcements"],
        "litePluginSettings": {"@jupyterlite/pyodide-kernel-extension:kernel": _KERNEL},
    },
}
_SETTINGS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}
"""All cells are on the page, for the browser's own search and for readers of screens."""


def build(site: Path) -> Path:
    """Write the page into a site and return its folder.

    Raises:
        SystemExit: the page that reads snapshots is not there, wheels cannot be downloaded, or JupyterLite fails.
    """
    lock = site / _PYTHON / _LOCK
    if not lock.exists():
        raise SystemExit(f"nbguard: {site} has no page that reads snapshots. Run: docs/site/snapshot_doctor.py {site}")
    folder, known = site / "lite", json.loads(lock.read_text(encoding="utf-8"))
    wheels = _downloaded(known["info"]["python"])
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        _jupyterlite(Path(work), wheels, folder)
    _put_wheels(wheels, folder / "wheels", known)
    return folder


def _jupyterlite(work: Path, wheels: Path, folder: Path) -> None:
    """Write JupyterLite with the notebook and the recordings."""
    contents = shutil.copytree(_SOURCES, work / "contents", ignore=shutil.ignore_patterns(".*", _WHEELS.name))
    shutil.copy(_RECORDING, contents)
    extensions = [_kernel_extension(wheels, work / "kernel"), *map(_extension, _EXTENSIONS)]
    build = _BUILD | {"federated_extensions": [str(extension) for extension in extensions]}
    (work / "jupyter_lite_config.json").write_text(json.dumps({"LiteBuildConfig": build}), encoding="utf-8")
    (work / "jupyter-lite.json").write_text(json.dumps(_PAGE), encoding="utf-8")
    (work / "overrides.json").write_text(json.dumps(_SETTINGS), encoding="utf-8")
    _run(
        "JupyterLite could not be built.",
        *("jupyterlite_core", "build", "--output-dir", str(folder.resolve())),
        cwd=work,
    )


def _kernel_extension(wheels: Path, folder: Path) -> Path:
    """Unpack the extension with the page's kernel. It is not installed here, as it fails in JupyterLab itself."""
    (wheel,) = wheels.glob(_KERNEL_WHEEL)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (extension,) = folder.glob(_KERNEL_EXTENSION)
    return extension


def _extension(name: str) -> Path:
    """Return the folder of an extension of JupyterLab that is installed here."""
    found = next((path for path in map(Path, jupyter_path("labextensions", name)) if path.is_dir()), None)
    if found is None:
        raise SystemExit(f"nbguard: JupyterLab's extension {name} is not installed. Run: make docs")
    return found


def _put_wheels(downloaded: Path, folder: Path, lock: dict[str, Any]) -> None:
    """Write the wheels of the page's Python, and Pyodide's list of them."""
    shutil.copytree(downloaded, folder, ignore=shutil.ignore_patterns(_KERNEL_WHEEL))
    _write_nbguard(folder)
    wheels = {_normal(wheel.name.partition("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    lock["packages"] = {name: _entry(name, wheel, set(wheels)) for name, wheel in wheels.items()}
    (folder / _LOCK).write_text(json.dumps(lock), encoding="utf-8")


def _downloaded(python: str) -> Path:
    """Return a folder with the wheels for a version of Python. They are downloaded once."""
    folder = _KEPT / hashlib.sha256(python.encode() + _WHEELS.read_bytes()).hexdigest()[:12]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            _run(
                "the wheels of docs/lite/wheels.txt could not be downloaded. Check that the package index can be reached.",
                *("pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"),
                *("--platform=any", f"--python-version={python}", f"--dest={work}/wheels", f"--requirement={_WHEELS}"),
            )
            Path(work, "wheels").rename(folder)
    return folder


def _write_nbguard(folder: Path) -> None:
    """Write nbguard's wheel, of this checkout and without the extension of JupyterLab, which takes npm to build."""
    metadata = importlib.metadata.metadata("nbguard")
    package = _ROOT / "nbguard"
    files = [file for file in sorted(package.rglob("*")) if file.suffix in (".css", ".js", ".json", ".py")]
    entries = {file.relative_to(_ROOT).as_posix(): file.read_bytes() for file in files if "labextension" not in file.parts}
    name = f"nbguard-{metadata['Version']}"
    entries[f"{name}.dist-info/METADATA"] = str(metadata).encode()
    entries[f"{name}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: nbguard\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    write_archive(folder / f"{name}-py3-none-any.whl", entries)


def _entry(name: str, wheel: Path, known: set[str]) -> dict[str, Any]:
    """Return a wheel's entry in Pyodide's list. Of the packages that it asks for it has those that the page has."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (entry for entry in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry))
        asked = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    return {
        "name": name,
        "version": wheel.name.split("-")[1],
        "file_name": wheel.name,
        "install_dir": "site",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "package_type": "package",
        "imports": [],
        "depends": sorted({_normal(each.name) for each in map(Requirement, asked) if _is_for_a_browser(each)} & known),
        "unvendored_tests": False,
    }


def _is_for_a_browser(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"sys_platform": "emscripten", "extra": ""})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(failure: str, *module: str, cwd: Path | None = None) -> None:
    """Run a module of Python in a folder, quietly unless it fails."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(  # noqa: S603 - this Python, with modules of ours
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"nbguard: {failure}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
