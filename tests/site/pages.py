"""The pages of the site as the tests read them: their cells, and what is shown below each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PageCell:
    """A cell of a page."""

    code: str
    shown: tuple[str, ...]  # lines below it, each with its blanks made one; `…` stands for anything


def files() -> list[Path]:
    """Return all pages."""
    return sorted(DOCS.rglob("*.md"))


def blocks(file: Path, language: str) -> list[str]:
    """Return the texts of a page's blocks in one language."""
    return [text for name, text in _BLOCK.findall(file.read_text(encoding="utf-8")) if name == language]


def cells(file: Path) -> list[PageCell]:
    """Return the cells of a page, in order, each with the text block that follows it at once."""
    text = file.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    following = [*found[1:], None][: len(found)]
    return [
        PageCell(block[2], () if after is None or not _is_output(text, block, after) else lines(after[2]))
        for block, after in zip(found, following, strict=True)
        if block[1] == "python"
    ]


def _is_output(text: str, block: re.Match[str], after: re.Match[str]) -> bool:
    return after[1] == "text" and not text[block.end() : after.start()].strip()


def lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text that are not blank, their blanks made one."""
    return tuple(" ".join(line.split()) for line in text.splitlines() if line.strip())


def missing(shown: tuple[str, ...], printed: tuple[str, ...]) -> list[str]:
    """Return the lines of a page that the cell has not printed."""
    patterns = [re.compile(".*".join(map(re.escape, line.split("…")))) for line in shown]
    return [line for line, pattern in zip(shown, patterns, strict=True) if not any(map(pattern.fullmatch, printed))]
