"""`nbguard enable` and `disable`: the file that they write loads nbguard in a kernel, silently, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbguard.frontend.cli import main
from tests.kernels import Kernel, Zygote
from tests.other_users import VICTIM, folder_of, needs_root, run_as


@pytest.fixture
def ipython_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path


def test_a_kernel_loads_what_enable_has_written(
    ipython_folder: Path, plain_zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enable"]) == 0
    file = ipython_folder / "profile_default" / "startup" / "50-nbguard.py"
    assert str(file) in capsys.readouterr().out
    kernel = Kernel(plain_zygote, profile={"startup/50-nbguard.py": file.read_text()})
    try:
        names = kernel.value("[name for name in get_ipython().user_ns if 'nbguard' in name]")
        assert names == []
        assert kernel.value("'torch' in __import__('sys').modules") is False
        cell = kernel.run("%nbguard").ok()
        assert "notices" in cell.text
        assert kernel.run("1").ok().text == "1"
    finally:
        kernel.stop()


_AT_A_START = """
import os, sys
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
app.initialize(["--quiet"])
app.shell.run_line_magic("load_ext", "nbguard")
app.shell.run_cell("x = 1")
with open("modules", "w") as file:
    file.write("\\n".join(sys.modules))
os._exit(0)
"""


def test_to_load_it_imports_nothing_that_only_a_scan_needs(tmp_path: Path) -> None:
    """It takes twenty milliseconds of a kernel's start, and a hundred with these."""
    subprocess.run([sys.executable, "-c", _AT_A_START], cwd=tmp_path, check=True, capture_output=True, timeout=120)

    modules = (tmp_path / "modules").read_text().splitlines()
    assert "nbguard.memory.cells.notices" in modules
    assert not {"nbguard.memory.core.facts", "nbguard.libraries", "torch"} & {*modules}


def test_enable_disable_and_status(ipython_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ipython_folder / "profile_lab" / "startup" / "00-mine.py"
    other.parent.mkdir(parents=True)
    other.write_text("x = 1")
    file = other.parent / "50-nbguard.py"

    said = []
    for command, is_there in (("status", False), ("enable", True), ("enable", True), ("status", True), ("disable", False)):
        assert main([command, "--profile", "lab"]) == 0
        assert file.exists() is is_there
        said.append(capsys.readouterr().out.split(maxsplit=4)[:4])
    assert [line[0] for line in said] == ["nbguard", "wrote", "nbguard", "nbguard", "removed"]
    assert [" ".join(said[place]) for place in (0, 2)] == ["nbguard is not loaded", "nbguard is loaded in"]
    assert other.read_text() == "x = 1"
    assert main(["disable", "--profile", "lab"]) == 0
    assert main(["enable", "--profile", "labb"]) == 2
    assert not file.parents[2].joinpath("profile_labb").exists()


def test_a_file_of_somebody_elses_stays(ipython_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ipython_folder / "profile_default" / "startup" / "50-nbguard.py"
    file.parent.mkdir(parents=True)
    file.write_text("mine = 1")

    assert [main([command]) for command in ("enable", "disable")] == [2, 2]
    assert file.read_text() == "mine = 1"
    assert "so it stays" in capsys.readouterr().err
    assert main(["enable", "--profile", "../x"]) == 2


def test_without_nbguard_in_the_environment_nothing_happens(ipython_folder: Path) -> None:
    main(["enable"])
    source = (ipython_folder / "profile_default" / "startup" / "50-nbguard.py").read_text()
    space: dict[str, object] = {"get_ipython": lambda: object()}

    exec(source.replace('find_spec("nbguard")', 'find_spec("nbguard_that_is_not_there")'), space)

    assert "_load_nbguard" not in space


@needs_root
@pytest.mark.parametrize("variable", ["HOME", "IPYTHONDIR"])
@pytest.mark.parametrize("command", ["enable", "disable", "status"])
def test_a_home_that_cannot_be_written_to_is_said(open_tmp_path: Path, variable: str, command: str) -> None:
    """F23 of the red team: IPython makes a temporary folder at each call then, in which nothing is ever enabled."""
    for name in ("home", "temporary"):
        folder_of(0 if name == "home" else VICTIM, open_tmp_path / name)
    code = f"print(main([{command!r}])); print(list(Path(os.environ['TMPDIR']).iterdir()))"
    where = {variable: str(open_tmp_path / "home"), "TMPDIR": str(open_tmp_path / "temporary")}

    imports = "import IPython.paths, nbguard.frontend.cli.commands, nbguard.frontend.notebook.startup\nfrom nbguard.frontend.cli import main"
    said = run_as(VICTIM, code, imports=f"{imports}\nsys.stderr = sys.stdout", **where).splitlines()

    assert said[0].startswith("nbguard: IPython cannot keep files")
    assert str(open_tmp_path / "home") in said[0]
    assert said[1:] == ["2", "[]"]
