"""Answers of the page that reads snapshots in a browser, without a browser: they are the command line's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.browser import Page, modules
from nbguard.frontend.cli import main
from tests.cli.test_files import ROOT, snapshot_file


def _ask(page: Page, ask: str, **question: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.answer(json.dumps({"ask": ask, **question})))
    return found


@pytest.fixture
def told() -> list[tuple[str, int, int]]:
    """The progress that a page was told."""
    return []


@pytest.fixture
def page(told: list[tuple[str, int, int]]) -> Page:
    """A page without files."""
    return Page(lambda *progress: told.append(progress))


def _said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    main(line)
    return capsys.readouterr().out.removesuffix("\n")


def test_answers_are_the_command_lines(
    page: Page, told: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (str(snapshot_file(tmp_path, name)) for name in ("2.13.0_118", "2.13.0_121"))
    for file in (first, second):
        assert _ask(page, "open", path=file)["text"].startswith("cuda:0 ran out of memory") or "error" not in file

    assert _ask(page, "diagnose", path=first)["text"] == _said(capsys, "diagnose", first)
    assert _ask(page, "moment", path=first, at=400, device=0)["text"] == _said(capsys, "map", first, "--at", "400")
    asked = _ask(page, "diff", before=first, after=second, at=["peak", None])
    assert asked["text"] == _said(capsys, "diff", first, second, "--at", "peak")
    assert {stage for stage, _, _ in told} == {"read", "runs"}


def test_the_history_tells_where_the_peak_and_the_refusal_are(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "notebooks" / "out_of_memory.pickle")
    _ask(page, "open", path=file)

    (device,) = _ask(page, "history", path=file)["devices"]

    for moment in ("peak", "oom"):
        (then,) = json.loads(_said(capsys, "map", file, "--at", moment, "--json"))["devices"]
        assert (device["events"], device[moment]) == (then["events"], then["event"])


def test_a_file_that_is_none_is_a_sentence(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "it is\x1b[31m none.pickle"
    file.write_bytes(b"hello")

    found = _ask(page, "open", path=str(file))

    assert set(found) == {"error"}
    assert "\x1b" not in found["error"]


def test_it_needs_nothing_but_python(tmp_path: Path) -> None:
    for file in modules(ROOT / "nbguard"):
        place = tmp_path / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    questions = [
        {"ask": ask, "path": str(ROOT / "notebooks" / "out_of_memory.pickle")} for ask in ("open", "diagnose", "history")
    ]
    questions.append({**questions[0], "ask": "moment", "at": "peak", "device": 0})
    program = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
import time; del time.thread_time_ns  # as in a browser
from nbguard.frontend.browser import Page
page = Page(lambda *progress: None)
print(json.dumps([sorted(json.loads(page.answer(json.dumps(question)))) for question in {questions!r}]))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == [["html", "text"], ["html", "text"], ["devices"], ["html", "text"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["map", "FILE", "--at", "999999"], "has the events 0 to 346, and no 999999"),
        (["map", "FILE", "--at", "now"], "is no moment; write it as 18204"),
        (["map", "FILE", "--at", "peak", "--device", "cuda:3"], "cuda:3 has no history; there is one of: cuda:0"),
        (["map", "FILE", "--device", "gpu"], "is no device; write it as 1, or cuda:1"),
        (["map", "FILE", "--device", "2"], "nothing of cuda:2 is in it"),
        (["diff", "FILE"], "give two files, the earlier one first, or one with --at EVENT --and EVENT"),
        (["map", "BARE", "--at", "peak"], "it has no history, so no earlier moment is known"),
        (["diff", "BARE", "--and", "3"], "it has no history"),
    ],
)
def test_a_moment_that_is_none_is_one_line(
    line: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.json"
    bare.write_text('{"segments": []}')
    files = {"FILE": str(ROOT / "notebooks" / "out_of_memory.pickle"), "BARE": str(bare)}

    assert main([files.get(word, word) for word in line]) == 2
    error = capsys.readouterr().err

    assert said in error
    assert error.count("\n") == 1


def test_the_peak_is_said_to_be_there_and_the_diff_of_two_moments_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "notebooks" / "out_of_memory.pickle")

    peak = json.loads(_said(capsys, "map", file, "--at", "peak", "--json"))
    grown = json.loads(_said(capsys, "diff", file, "--at", "0", "--and", "peak", "--json"))

    (device,), (changes,) = peak["devices"], grown["devices"]
    assert device["event"] == device["peak_event"]
    assert device["allocated"] == device["peak"] == changes["allocated"]["after"]
    assert sum(row["grown"] for row in changes["holders"]) == changes["allocated"]["grown"]
    assert sum(row["retained"] for row in peak["report"]["report"]["devices"][0]["holders"]) == device["allocated"]
    assert device["course"][-1]["event"] == device["events"]
    assert "The peak was here, " in _said(capsys, "map", file, "--at", "peak")
