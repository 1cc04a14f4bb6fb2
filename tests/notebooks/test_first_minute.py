"""README's first lines, pasted as they stand: into a terminal and into a notebook, as one block and line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.kernels import Kernel, Zygote

_README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCK = re.search(r"## Thirty seconds\n.*?```python\n(.*?)```", _README, re.DOTALL)[1].rstrip()  # type: ignore[index]
LINES = BLOCK.splitlines()

SHOWN = (
    "losses  list of 25  frees now 100 MiB · reaches 100 MiB",  # why
    "freed 100 MiB of 100 MiB promised",
)
"""What each of the lines leads to, on any machine."""
_MISTAKE = re.compile(r"Error|Traceback|Warning|unknown|not found|mistake")


def expect_shown(text: str) -> None:
    """Fail unless everything is shown, and no error."""
    assert not _MISTAKE.search(text), text
    assert re.search(r"losses +100 MiB +100 MiB +In\[\d\] +list of 25", text), text
    assert [line for line in SHOWN if line not in text] == [], text


def test_it_is_five_lines() -> None:
    assert len(LINES) == 5
    assert LINES[0] == "%load_ext nbguard"


def test_as_one_cell(plain_kernel: Kernel) -> None:
    cell = plain_kernel.run(BLOCK).ok()

    expect_shown(f"{cell.text}\n{cell.stdout}{cell.stderr}")
    assert plain_kernel.value("'losses' in globals()") is False


def test_line_by_line(plain_kernel: Kernel) -> None:
    cells = [plain_kernel.run(line).ok() for line in LINES]

    expect_shown("\n".join(f"{cell.text}\n{cell.stdout}{cell.stderr}" for cell in cells))


def _environment(folder: Path) -> dict[str, str]:
    quiet = {"IPYTHONDIR": str(folder), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet}


_IPYTHON = ["-m", "IPython", "--no-banner", "--no-confirm-exit", "--HistoryManager.hist_file=:memory:", "--colors=nocolor"]


@pytest.mark.slow
def test_in_a_terminal_line_by_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, *_IPYTHON, "--simple-prompt"],
        input=f"{BLOCK}\n",
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    expect_shown(run.stdout + run.stderr)


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of Unix")
def test_in_a_terminal_as_one_paste(tmp_path: Path) -> None:
    """As a terminal pastes: between the two marks of a bracketed paste."""
    shell = pexpect.spawn(
        sys.executable, _IPYTHON, env=_environment(tmp_path), encoding="utf-8", dimensions=(60, 160), timeout=120
    )
    try:
        shell.expect(r"In \[1\]:")
        shell.send(f"\x1b[200~{BLOCK}\x1b[201~")
        shell.send("\x1b\r")  # runs it, wherever the cursor is
        shell.expect(r"In \[2\]:")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shell.before)
    finally:
        shell.sendeof()
        shell.close(force=True)

    expect_shown(text)


def test_the_help_of_each_magic_is_clean_text(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    for magic in ("%gpumem", "%reset_gpu", "%nbguard", "%%profile_fit"):
        text = re.sub(r"\x1b\[[0-9;]*m", "", plain_kernel.value(f"get_ipython().object_inspect_text({magic!r})"))
        assert "::" not in text
        assert magic in text
        assert f"%{magic}" not in text


TARGETS = 'import torch; runs = {"#1": torch.ones(1 << 18), "a b#": torch.ones(1 << 18)}; x = torch.ones(1 << 18)'
COMMENTS = {
    "%gpumem # who holds it": "held by",
    "%gpumem#": "",
    "%gpumem -n 3 # it's the rows, \"quoted": "held by",
    "%gpumem why x # why(": "reaches 1 MiB",
    "report = %gpumem  # {x} $x [1": "held by",
    "%gpumem oom # after running out of memory": "",
    "%gpumem map # which tensor pins which segment": "",
    "%gpumem history # after cells": "",
    "%gpumem cells on # a line after each cell": "",
    "%gpumem cells off # enough": "",
    "%gpumem record on # keep the allocator's history": "",
    "%gpumem record off # and forget it": "",
    "%gpumem simulate 16GiB # no GPU": "",
    "%gpumem simulate off # no more": "",
    "%nbguard # what is on": "history of cells",
    "%nbguard on --auto-clean-errors # the error's frames": "history of cells",
    "%nbguard off # done": "history of cells",
    "%reset_gpu --dry-run # what would go": "",
    '%reset_gpu --dry-run runs["#1"] # just this one': 'runs["#1"] will be deleted',
    "%reset_gpu --dry-run runs['a b#'] x # two": "x will be deleted",
    "%reset_gpu --keep x # it's needed": "",
    "%reset_gpu --workers # it's time": "",
    "%reset_gpu --zombies # what a dead program left": "",
    "%reset_gpu --park x # out of the way": "",
    "%reset_gpu --unpark x # and back": "",
    "%reset_gpu --hard # all of it": "",
    'r = %reset_gpu runs["#1"] # for good': "freed 1 MiB of 1 MiB promised",
    "%%profile_fit # where time goes\n1 + 1": "",
    "%%profile_fit --memory # it's the peak\n1 + 1": "",
}
"""A line with a comment, and a part of what it shows; lines with an empty part only must not be misread."""


@pytest.fixture(scope="module")
def commented(plain_zygote: Zygote) -> Iterator[Kernel]:
    kernel = Kernel(plain_zygote)
    kernel.run("%load_ext nbguard").ok()
    kernel.run(TARGETS).ok()
    yield kernel
    kernel.stop()


@pytest.mark.parametrize("line", COMMENTS)
def test_a_comment_is_not_read(commented: Kernel, line: str) -> None:
    cell = commented.run(line)

    assert COMMENTS[line] in cell.text
    assert not re.search(r"unknown|unrecognized|missing|takes no|invalid", f"{cell.error} {cell.stderr}"), cell.error
