"""No code of the pages goes unchecked: each block is run, parsed, made from the program, or listed here with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.site.pages import DOCS, ROOT, blocks, files

_FENCE = re.compile(r"^(`{3,}|:{3,})(.*)$")
_MADE = ("{magic}", "{command}", "{toctree}", "{image}", "{include}", "{eval-rst}", "{")
"""Directives: their text is made by the build, which fails where one is wrong."""

_SHOWN = "what a session of its own has printed, shown for its form"
NOT_RUN = {
    "guide/cells.md": [("In[14]  +364.03 MiB", _SHOWN)],
    "guide/notices.md": [("`model` is deleted", _SHOWN)],
    "guide/profile.md": [("In [4]: %%profile_fit", _SHOWN)],
    "guide/stale.md": [("In [17]: %reset_gpu", _SHOWN)],
    "guide/hosts.md": [("%pip install nbguard", "installs from an index, and there is no release yet")],
    "guide/ranks.md": [
        ("nbguard, rank 0: rank 1 has left out", "output of two processes; tests/ranks has it from real ones"),
        ("The parameter `head.bias` of Linear differs", "output of two processes; tests/ranks has it from real ones"),
    ],
    "guide/snapshots.md": [("torch.cuda.memory._record_memory_history()", "PyTorch's own, and needs a GPU")],
}
"""Blocks that no test runs, by the beginning of their text."""

INSTALLED = {"pip install ."}
"""Lines of a shell that setup/readme runs on a bare Debian."""


def unlabelled(file: Path) -> list[tuple[str, str]]:
    """Return (language, text) of each block that is neither a cell, nor what a cell prints, nor a line of a shell."""
    rest, lines, after_cell = [], file.read_text(encoding="utf-8").splitlines(), False
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            after_cell = after_cell and not lines[at].strip()
            at += 1
            continue
        end = next(place for place in range(at + 1, len(lines)) if lines[place].strip() == fence[1])
        language = fence[2].strip()
        is_output = language == "text" and after_cell
        if language not in ("python", "sh") and not language.startswith(_MADE) and not is_output:
            rest.append((language, "\n".join(lines[at + 1 : end])))
        after_cell = language == "python"
        at = end + 1
    return rest


@pytest.mark.parametrize("page", [*files(), ROOT / "README.md"], ids=lambda page: page.name)
def test_a_block_that_is_not_run_has_its_reason(page: Path) -> None:
    listed = NOT_RUN.get(page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name, [])
    left = unlabelled(page)

    assert [text.splitlines()[0][: len(start)] for (_, text), (start, _) in zip(left, listed, strict=False)] == [
        start for start, _ in listed
    ]
    assert len(left) == len(listed), left


@pytest.mark.parametrize("page", [*files(), ROOT / "README.md"], ids=lambda page: page.name)
def test_lines_of_a_shell_are_nbguards_or_run_by_setup(page: Path) -> None:
    lines = {line for text in blocks(page, "sh") for line in text.splitlines()}

    assert {line for line in lines if not line.startswith("nbguard ")} <= INSTALLED


def test_the_readme_has_the_cell_that_the_site_runs() -> None:
    (first,) = blocks(ROOT / "README.md", "python")

    assert first in blocks(DOCS / "start.md", "python")
