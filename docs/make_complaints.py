"""The page docs/complaints.md, made from the table tests/data/complaints.txt: python docs/make_complaints.py writes it anew.

A line of the table has a state, the complaint, its answer, the test that shows it, the numbers of the wishes that it is, in
the list with which the project began, and what is lacking. A line with ## begins a section.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "complaints.md"
WISHES = 99

_HEAD = f"""# What nbguard does for each complaint

nbguard began with {WISHES} complaints and wishes of people who train in notebooks. Each row has the command that answers one,
and the test that shows it. ● is answered, ◐ in part, with what is lacking and why. Made from `tests/data/complaints.txt` by
`docs/make_complaints.py`; a test sees that it is current and that each test is there.
"""


class Complaint(NamedTuple):
    """A complaint in a user's words."""

    state: str  # ●: answered, ◐: in part, ○: not
    words: str
    answer: str  # a command, or where the answer comes by itself
    test: str  # its pytest node below `tests`, without parameters
    wishes: tuple[int, ...]  # numbers in the list
    lacking: str  # and why; empty where nothing is


def sections() -> dict[str, list[Complaint]]:
    """Return the complaints of the table by the title of their section."""
    found: dict[str, list[Complaint]] = {}
    for line in (ROOT / "tests" / "data" / "complaints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif line:
            state, words, answer, test, wishes, lacking = (part.strip() for part in f"{line} ".split(" | "))
            numbers = tuple(int(number) for number in wishes.split(","))
            found[[*found][-1]].append(Complaint(state, words, answer, test, numbers, lacking))
    return found


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for title, rows in sections().items() for line in _section(title, rows))])


def _section(title: str, rows: list[Complaint]) -> Iterator[str]:
    yield f"## {title}\n\n| | complaint | answer | test |\n|---|---|---|---|"
    for row in rows:
        words = f"{row.words} ({row.lacking})" if row.lacking else row.words
        file, _, name = row.test.partition("::")
        yield f"| {row.state} | {words} | {row.answer} | `tests/{file}:{name}` |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
