"""No code of the pages goes unchecked: each block is run, parsed, made from the program, or listed here with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.site.pages import DOCS, ROOT, blocks, files

_FENCE = re.compile(r"^(`{3,}|:{3,})(.*)$")
_DIRECTIVE = "{"
"""Begins the text of a directive, which is made by the build. It fails where one is wrong."""
_MADE = re.compile(r"<!-- (help|api|fields): .*?<!-- end -->", re.DOTALL)
"""What docs/make_help.py makes; `test_reference.py` sees that it is current."""

_SHOWN = "what a session of its own has printed, shown for its form"
NOT_RUN = {
    "assistants.md": "the configuration of another program; tests/mcp has the lines and a real client",
    "benchmarks.md": "what `make gpu-day` has printed on a GPU",
    "guide/cells.md": _SHOWN,
    "guide/dashboards.md": "tests/profiler/test_dashboards.py asks a real Prometheus, where one is installed",
    "guide/hosts.md": "installs from an index, and there is no release yet",
    "guide/jobs.md": "output of scripts that ran out of a device's memory, as tests/cuda/test_jobs.py runs them",
    "guide/libraries.md": "tests/libraries/test_toy_library.py installs a library with this description",
    "guide/lint.md": "bad and good lines of each rule; tests/lint/cases has programs with them, and runs all",
    "guide/notices.md": _SHOWN,
    "guide/processes.md": "several notebooks on one GPU, as tests/cuda/test_zombies.py starts them",
    "guide/profile.md": _SHOWN,
    "guide/pytest.md": "commands of pytest and GitHub; tests/gpu_leaks runs pytest with every option",
    "guide/ranks.md": "output of several processes; tests/ranks has such from real ones",
    "guide/snapshots.md": "lines of PyTorch's own, which need a GPU",
    "guide/stale.md": _SHOWN,
}
"""Pages with blocks that no test runs, and why."""

INSTALLED = {
    "python3 -m venv ~/env && . ~/env/bin/activate && pip install torch   # only where there is no environment yet",
    "pip install .",
}
"""Lines of a shell that setup/readme runs on a bare Debian."""


def unlabelled(file: Path) -> list[tuple[str, str]]:
    """Return (language, text) of each block that is neither a cell, nor what a cell prints, nor a line of a shell."""
    rest, lines, after_cell = [], _MADE.sub("", file.read_text(encoding="utf-8")).splitlines(), False
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
        if language not in ("python", "sh") and not language.startswith(_DIRECTIVE) and not is_output:
            rest.append((language, "\n".join(lines[at + 1 : end])))
        after_cell = language == "python"
        at = end + 1
    return rest


def test_pages_with_blocks_that_are_not_run_have_a_reason() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in files() if unlabelled(page)}

    assert pages == set(NOT_RUN)
    assert unlabelled(ROOT / "README.md") == []


@pytest.mark.parametrize("page", [*files(), ROOT / "README.md"], ids=lambda page: page.name)
def test_lines_of_a_shell_are_nbguards_or_run_by_setup(page: Path) -> None:
    lines = {line for text in blocks(page, "sh") for line in text.splitlines()}

    assert {line for line in lines if not line.startswith("nbguard ")} <= INSTALLED


def test_the_readme_has_the_cell_that_the_site_runs() -> None:
    (first,) = blocks(ROOT / "README.md", "python")

    assert first in blocks(DOCS / "start.md", "python")
