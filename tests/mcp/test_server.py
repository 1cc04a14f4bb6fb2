"""The server as an assistant meets it: the protocol's official client, over standard input and output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import ClientSession, MCPError, StdioServerParameters, stdio_client

import nbguard
from nbguard.frontend.cli import main
from nbguard.frontend.mcp.tools import TOOLS, input_schema, output_schema
from tests.cli.test_files import snapshot_file
from tests.mcp.assistant import ROOT, Assistant, assistant, said

_RUN = "2.13.0_118"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server is started in, with a snapshot, and with modules that nothing may import."""
    folder = tmp_path_factory.mktemp("folder")
    snapshot_file(folder, _RUN)
    for name in ("json", "nbguard", "dataclasses", "torch", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()")
    return folder


@pytest.fixture(scope="module")
def asking(folder: Path) -> Iterator[Assistant]:
    """An assistant of the protocol's newest version; a session of the earlier ones is below."""
    with assistant(cwd=folder) as asking:
        yield asking


def test_the_handshake_names_the_server_and_its_tools(asking: Assistant) -> None:
    client = asking.client

    assert client.server_info is not None
    assert (client.server_info.name, client.server_info.version) == ("nbguard", nbguard.__version__)
    assert client.server_capabilities.tools is not None
    assert client.server_capabilities.resources is None
    assert client.instructions
    assert "only the person" in client.instructions


def test_each_tool_is_listed_with_its_schemas_and_only_reads(asking: Assistant) -> None:
    listed = asking.tools()

    assert list(listed) == list(TOOLS)
    for name, tool in listed.items():
        assert tool.input_schema == input_schema(TOOLS[name])
        assert tool.output_schema == output_schema(TOOLS[name])
        assert tool.annotations is not None
        assert (tool.annotations.read_only_hint, tool.annotations.destructive_hint) == (True, False)


def test_an_answer_is_the_command_lines_as_document_and_as_text(
    asking: Assistant, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    file = f"{_RUN}.pickle"
    main(["diagnose", "--json", file])
    document = json.loads(capsys.readouterr().out)
    main(["diagnose", file])
    text = capsys.readouterr().out

    answered = asking.call("explain_oom", file=file)

    assert answered.structured_content == document
    assert asking.text("explain_oom", file=file).rstrip() == text.rstrip()


def test_bad_arguments_are_a_line_that_the_assistant_can_read(asking: Assistant) -> None:
    assert "its field 'file' should be str" in asking.refusal("explain_oom", file=3)
    assert "a field 'path'" in asking.refusal("explain_oom", path="x")
    assert "its field 'files' is missing" in asking.refusal("lint")
    assert "there is no such file" in asking.refusal("explain_oom", file="none.pickle")
    assert "a file or a kernel, not both" in asking.refusal("explain_oom", file=f"{_RUN}.pickle", kernel="x")
    assert "no running kernel lets assistants look" in asking.refusal("who_holds")


def test_an_unknown_tool_and_an_unknown_method_are_errors_of_the_protocol(asking: Assistant) -> None:
    with pytest.raises(MCPError, match="there is no tool 'shell'") as error:
        asking.call("shell", command="id")
    assert error.value.code == -32602


@pytest.mark.parametrize(
    ("tool", "path"), [("explain_oom", "/etc/passwd"), ("who_holds", "../x"), ("what_if", f"{_RUN}.pickle/../../../etc/passwd")]
)
def test_no_path_leads_out_of_the_folder(asking: Assistant, tool: str, path: str) -> None:
    assert "is outside of the folders" in asking.refusal(tool, file=path)


def test_nothing_of_the_folder_was_imported(asking: Assistant, folder: Path) -> None:
    asking.call("lint", files=["."])
    asking.refusal("predict", script="nbguard.py")

    assert not (folder / "imported").exists()


def test_no_kernel_is_listed_without_consent(asking: Assistant) -> None:
    assert asking.data("kernels")["kernels"] == []
    assert "%nbguard mcp on" in asking.text("kernels")


def test_a_plain_session_initializes_lists_and_calls() -> None:
    """The steps of the protocol one by one, as a client without the convenience takes them."""

    async def steps() -> tuple[Any, ...]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "nbguard", "mcp"], cwd=str(ROOT), env={"PYTHONPATH": ":".join(sys.path)}
        )
        async with stdio_client(command) as (read, write), ClientSession(read, write) as session:
            started = await session.initialize()
            await session.send_ping()
            listed = await session.list_tools()
            called = await session.call_tool("kernels", {})
            wrong = await session.call_tool("why", {})
            return started, listed, called, wrong

    started, listed, called, wrong = anyio.run(steps)

    assert started.server_info.name == "nbguard"
    assert {tool.name for tool in listed.tools} == {*TOOLS}
    assert (called.is_error, called.structured_content["kind"]) == (False, "kernels")
    assert wrong.is_error


_TRAIN = """
import pathlib, sys, torch
pathlib.Path("ran").write_text(" ".join(sys.argv[1:]))
print("this is no message of the protocol")
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1024)), batch_size=32)
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_is_predicted_where_the_person_allows_that(tmp_path: Path, torch_process: None) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)

    with assistant("--run-scripts", cwd=tmp_path) as asking:
        answered = asking.call("predict", script="train.py", gpus=["16GiB"], arguments=["--epochs", "1"])

    assert answered.structured_content["kind"] in TOOLS["predict"].kinds
    assert "fits" in said(answered)
    assert "this is no message" not in said(answered)
    assert (tmp_path / "ran").read_text() == "--epochs 1"


@pytest.mark.slow
def test_the_machine_is_diagnosed(tmp_path: Path, torch_process: None) -> None:
    with assistant(cwd=tmp_path) as asking:
        assert asking.data("diagnose", ranks=True)["checks"]


# --- The command.


def test_the_server_says_in_one_line_what_it_needs(tmp_path: Path) -> None:
    for missing in ("mcp", "anyio"):
        program = f"import sys; sys.modules[{missing!r}] = None; from nbguard.frontend.cli import main; sys.exit(main(['mcp']))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)

        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr == f"nbguard: the server needs the package {missing}: run  pip install 'nbguard[mcp]'  and try again\n"
        )


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"nbguard: {tmp_path / 'none'} is not a folder\n"


def test_the_skill_file_has_what_agents_look_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--skill"]) == 0
    text = capsys.readouterr().out

    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert list(fields) == ["name", "description"]
    assert fields["name"] == "nbguard"
    assert 100 < len(fields["description"]) <= 1024
    assert all(f"`{name}`" in body for name in TOOLS if name != "kernels")
