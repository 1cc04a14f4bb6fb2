"""Errors of ranks brought home: the first apart from its echoes, and the cell and line that launched."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbguard
from nbguard.errors import RankFactsError
from nbguard.render.text import blocks_text
from nbguard.training.ranks.analysis.launch_errors import LaunchErrors, RankError
from nbguard.training.ranks.errors import leave_for_launcher
from tests.kernels import Kernel, Zygote

ECHO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:7048"
LIBRARIES = sysconfig.get_paths()["purelib"]
STACK = f"""Traceback (most recent call last):
  File "{LIBRARIES}/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367, in wrapper
    return f(*args, **kwargs)
  File "/home/me/train.py", line 12, in train
    step()
  File "{LIBRARIES}/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)

"""


def error_file(folder: Path, rank: int, error: str, at: int = 1_700_000_000) -> None:
    """Write an error file as torch's `@record` does."""
    more = {"py_callstack": f"{STACK}{error}\n", "timestamp": str(at)}
    (folder / "attempt_0" / str(rank)).mkdir(parents=True)
    (folder / "attempt_0" / str(rank) / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": more}}))


def test_an_echo_is_never_the_first_whatever_the_clock_says(tmp_path: Path) -> None:
    error_file(tmp_path, 0, ECHO, at=1_700_000_000)
    error_file(tmp_path, 1, "ValueError: a broken image", at=1_700_000_001)
    launch = nbguard.launch_errors(tmp_path)

    assert launch.sentence == "rank 1 raised first at `train.py:12 in train()`: ValueError: a broken image"
    assert [(error.rank, error.is_echo) for error in launch.errors] == [(1, False), (0, True)]
    assert "rank 0 failed because the other side" in blocks_text(tuple(launch.blocks()))


def test_of_two_errors_the_earlier_is_the_first(tmp_path: Path) -> None:
    error_file(tmp_path, 0, "ValueError: later", at=1_700_000_009)
    error_file(tmp_path, 1, "KeyError: 'earlier'", at=1_700_000_002)

    assert [error.rank for error in nbguard.launch_errors(tmp_path).errors] == [1, 0]


def test_an_error_that_all_ranks_raise_is_said_to_be_one(tmp_path: Path) -> None:
    error_file(tmp_path, 0, "KeyError: 'image 7'")
    error_file(tmp_path, 1, "KeyError: 'image 3'")
    launch = nbguard.launch_errors(tmp_path)

    assert launch.sentence == "ranks 0 and 1 raised the same error at `train.py:12 in train()`: KeyError: 'image 7'"
    assert "the same" in blocks_text(tuple(launch.blocks()))


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    error_file(tmp_path / "a", 0, "ValueError: old")
    error_file(tmp_path / "b", 0, "ValueError: new")
    for name, at in (("a", 1000), ("b", 2000)):
        (file,) = (tmp_path / name).rglob("error.json")
        os.utime(file, (at, at))

    assert nbguard.launch_errors(tmp_path).errors[0].error == "ValueError: new"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"message": 3}', "\0", "[" * 100_000, "{" + "x" * 100])
def test_other_files_are_one_line(tmp_path: Path, text: str) -> None:
    error_file(tmp_path, 3, "ValueError")
    (file,) = tmp_path.rglob("error.json")
    file.write_text(text)

    with pytest.raises(RankFactsError, match=r"3/error.json: not an error file") as refused:
        nbguard.launch_errors(tmp_path)
    assert "\n" not in str(refused.value)


def test_without_errors_one_line_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError(), raising=False)
    with pytest.raises(RankFactsError, match="give the folder of its error files"):
        nbguard.launch_errors()
    with pytest.raises(RankFactsError, match="torchrun --log-dir"):
        nbguard.launch_errors(tmp_path)
    with pytest.raises(RankFactsError, match="torchrun --log-dir"):
        nbguard.launch_errors(tmp_path / "nowhere")


def test_an_error_is_left_where_the_launcher_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "attempt_0" / "2" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise KeyError("label")
    except KeyError as error:
        leave_for_launcher(error)
        first = file.read_text()
        leave_for_launcher(ValueError("the launcher has one already"))
    assert file.read_text() == first

    (read,) = nbguard.launch_errors(tmp_path).errors
    assert (read.rank, read.error) == (2, "KeyError: 'label'")
    assert read.place.startswith("test_launch_errors.py:")


TRAIN = """
import os
def train(how):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1 and how == "raise":
        raise ValueError("a broken image")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(x)
"""
LAUNCH = """
from accelerate import notebook_launcher
notebook_launcher(train, ("{}",), num_processes=2, use_port="{}")
"""


@pytest.fixture(scope="module")
def notebook(fastai_zygote: Zygote, torch_process: None) -> Iterator[Kernel]:
    kernel = Kernel(fastai_zygote)
    kernel.run("%load_ext nbguard").ok()
    kernel.run(TRAIN).ok()
    yield kernel
    kernel.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_notebook_is_told_the_rank_and_its_line_and_the_cell_that_launched(notebook: Kernel) -> None:
    cell = notebook.run(LAUNCH.format("raise", free_port()), timeout=240)

    assert cell.error is not None
    assert cell.error[0] == "ChildFailedError"
    assert "rank 1 raised first at In[2], line 8 in train(): ValueError: a broken image" in cell.text
    assert "launched by In[3], line 2" in cell.text
    assert notebook.value("__import__('nbguard').launch_errors().errors[0].rank") == 1


def test_a_rank_that_was_killed_is_named_by_what_it_did_not_leave(notebook: Kernel) -> None:
    cell = notebook.run(LAUNCH.format("kill", free_port()), timeout=240)

    assert "rank 1 was ended by SIGKILL first" in cell.text or "rank 1 left no error; killed" in cell.text


def test_a_launch_on_a_port_that_is_taken_names_who_listens_there(notebook: Kernel) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cell = notebook.run(LAUNCH.format("raise", port), timeout=240)

    assert cell.error is not None
    assert f"port {port} is in use: process {os.getpid()} " in cell.text
    assert "%nbguard doctor --ranks" in cell.text
    again = cell.text.split("notebook_launcher(train, ")[1].split(")")[0]
    free = LAUNCH.format("raise", port).replace(f'use_port="{port}"', again)
    assert "rank 1 raised first" in notebook.run(free, timeout=240).text, "what is printed works"


def test_an_error_that_no_launcher_raised_shows_nothing(notebook: Kernel) -> None:
    cell = notebook.run("1 / 0")

    assert cell.error is not None
    assert cell.text == ""


def test_a_rank_that_was_aborted_points_to_where_the_calls_stand() -> None:
    aborted = RankError(rank=0, error="ended by SIGABRT", signal="SIGABRT")
    killed = RankError(rank=0, error="ended by SIGKILL", signal="SIGKILL")

    assert "with nbguard.watch_ranks():" in blocks_text(tuple(LaunchErrors(errors=(aborted,)).blocks()))
    assert "watch_ranks" not in blocks_text(tuple(LaunchErrors(errors=(killed,)).blocks()))


def test_of_several_ranks_that_left_no_error_none_is_accused() -> None:
    echo = RankError(rank=0, error=ECHO)

    one, two = LaunchErrors(errors=(echo,), silent=(1,)), LaunchErrors(errors=(echo,), silent=(1, 2))
    assert one.sentence.startswith("rank 0 was let down by rank 1: ")
    assert two.sentence.startswith("rank 0 was let down by another rank: ")
    assert "ranks 1 and 2 left no error" in blocks_text(tuple(two.blocks()))
