"""Every cell of the site runs, in the order of its page, and prints what the page shows below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import TORCH, Kernel, Zygote
from tests.site.pages import DOCS, PageCell, cells, files, lines, missing
from tests.thorough import THOROUGH

PAGES = [file for file in files() if cells(file)]


@pytest.fixture(scope="module")
def torch_process(temporary_folder: None) -> Iterator[Zygote]:
    """The parent of the pages' kernels, in which PyTorch is imported."""
    zygote = Zygote(TORCH)
    yield zygote
    zygote.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_each_cell_prints_what_the_page_shows(page: Path, torch_process: Zygote) -> None:
    kernel = Kernel(torch_process, frozen=not THOROUGH)
    try:
        for number, cell in enumerate(cells(page), start=1):
            expect(cell, kernel, f"{page.name}, cell {number}")
    finally:
        kernel.stop()


def expect(cell: PageCell, kernel: Kernel, where: str) -> None:
    """Run a cell; fail unless it prints what is shown, and has no error that is not shown."""
    done = kernel.run(cell.code)
    error = "" if done.error is None else f"{done.error[0]}: {done.error[1]}"
    printed = lines(f"{done.stdout}\n{done.stderr}\n{done.text}\n{error}")

    assert missing(cell.shown, printed) == [], f"{where}\n{cell.code}\n" + "\n".join(printed)
    assert not error or missing((f"{done.error[0]}: …",), cell.shown) == [], f"{where}\n{error}"  # type: ignore[index]
