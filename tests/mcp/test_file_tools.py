"""Answers from files: those of the command line, and of the allowed folders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.cli import main
from nbguard.frontend.mcp.file_tools import ServerPermissions, answer
from nbguard.frontend.mcp.tools import TOOLS
from tests.cli.test_files import snapshot_file
from tests.mcp.cases import out_of_memory, written
from tests.thorough import half_in_ci

_CONF = "expandable_segments:True"
_RUN = "2.13.0_118"
_LEAK = """
import torch
losses = []
for batch in loader:
    loss = model(batch)
    loss.backward()
    losses.append(loss)
"""


def _only(folder: Path) -> ServerPermissions:
    return ServerPermissions(folders=(str(folder),))


def _printed(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    main(line)
    return capsys.readouterr().out


@pytest.mark.parametrize("number", half_in_ci(range(50)))
def test_the_cause_is_the_one_that_the_command_line_names(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(out_of_memory()[number], tmp_path))

    answered = answer("explain_oom", {"file": file, "settings": [_CONF]}, _only(tmp_path))

    printed = json.loads(_printed(capsys, "diagnose", "--json", "--set", _CONF, file))
    assert answered.data["refusals"] == printed["refusals"] != []
    assert answered.data == printed
    cause = answered.text.splitlines()[1]
    assert "ran out of memory" in cause


def test_there_are_fifty_such_cases() -> None:
    assert len({*out_of_memory()}) == 50


@pytest.mark.parametrize(
    ("tool", "arguments", "line"),
    [
        ("explain_oom", {}, ["diagnose"]),
        (
            "explain_oom",
            {"settings": [_CONF, ""], "torch": "2.12", "capacity": "3GiB"},
            ["diagnose", "--set", _CONF, "--set", "", "--torch", "2.12", "--capacity", "3GiB"],
        ),
        ("what_if", {"settings": [_CONF]}, ["whatif", "--set", _CONF]),
    ],
    ids=["explain_oom", "explain_oom with options", "what_if"],
)
def test_the_text_is_that_of_the_command_line(
    tool: str, arguments: dict[str, Any], line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(snapshot_file(tmp_path, _RUN))

    answered = answer(tool, {"file": file, **arguments}, _only(tmp_path))

    assert answered.text.rstrip() == _printed(capsys, *line, file).rstrip()
    assert answered.data["kind"] in TOOLS[tool].kinds


def test_what_if_has_the_documents_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, _RUN)

    answered = answer("what_if", {"file": str(file), "settings": [_CONF]}, _only(tmp_path))

    (device,) = answered.data["devices"]
    printed = json.loads(_printed(capsys, "whatif", "--json", "--set", _CONF, str(file)))
    assert device == {name: value for name, value in printed.items() if name in device} | {"file": file.name}
    assert {*printed} - {*device} <= {"schema", "kind"}


def test_lint_is_that_of_the_command_line_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(_LEAK)

    answered = answer("lint", {"files": [str(tmp_path)]}, _only(tmp_path))

    assert answered.data == json.loads(_printed(capsys, "lint", "--json", str(tmp_path)))
    assert answered.text.rstrip() == _printed(capsys, "lint", str(tmp_path)).rstrip()
    assert answered.data["findings"]
    assert file.read_text() == _LEAK


def test_a_report_on_a_file_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    answered = answer("who_holds", {"file": str(snapshot_file(tmp_path, _RUN))}, _only(tmp_path))

    assert answered.data["kind"] == "saved"
    assert answered.text.startswith(f"{_RUN}.pickle")


# --- What is not allowed.


@pytest.mark.parametrize("tool", ["explain_oom", "who_holds", "what_if"])
@pytest.mark.parametrize(
    "path", ["/etc/passwd", "{}/../secret.pickle", "{}/link.pickle", "{}/folder/secret.pickle", "~/x", "\0"]
)
def test_a_file_elsewhere_is_refused(tool: str, path: str, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    secret = snapshot_file(tmp_path, _RUN).rename(tmp_path / "secret.pickle")
    (allowed / "link.pickle").symlink_to(secret)
    (allowed / "folder").symlink_to(tmp_path)

    with pytest.raises(NbguardError, match=r"is outside of the folders|is not the name of a file"):
        answer(tool, {"file": path.format(allowed)}, _only(allowed))


@pytest.mark.parametrize("name", ["../secret.py", "link.py", "."])
def test_lint_reads_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (tmp_path / "secret.py").write_text("password = 1")
    (allowed / "link.py").symlink_to(tmp_path / "secret.py")

    with pytest.raises(NbguardError, match="is outside of the folders"):
        answer("lint", {"files": [str(allowed / name)]}, _only(allowed))


def test_a_script_is_not_run_without_leave(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    with pytest.raises(NbguardError, match="nbguard mcp --run-scripts"):
        answer("predict", {"script": str(script)}, _only(tmp_path))
    with pytest.raises(NbguardError, match="is outside of the folders"):
        answer("predict", {"script": str(script)}, ServerPermissions(folders=(str(tmp_path / "other"),), run_scripts=True))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"file": "{}/none.pickle"}, "there is no such file"),
        ({"file": "{}"}, "it is a folder"),
        ({"file": "{}/text.pickle"}, "text.pickle"),
        ({"file": "{}/run.pickle", "capacity": "much"}, "much"),
        ({"file": "{}/run.pickle", "torch": "new"}, "'new' is not a PyTorch version"),
        ({"file": "{}/run.pickle", "settings": ["no:such"]}, "no"),
        ({}, "needs a file or a kernel"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    snapshot_file(tmp_path, _RUN, beside=False).rename(tmp_path / "run.pickle")
    (tmp_path / "text.pickle").write_text("no pickle")
    file = {"file": arguments["file"].format(tmp_path)} if "file" in arguments else {}

    with pytest.raises(NbguardError) as error:
        answer("explain_oom", {**arguments, **file}, _only(tmp_path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
