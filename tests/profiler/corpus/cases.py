"""The corpus: fits with one planted problem each, and healthy ones, written as the cells of a notebook.

A file is for one framework: its first cell, then cases. A case begins with `#: NAME [NUMBER] | says: PATTERN & PATTERN`, or
`| healthy`; `#-` divides its cells, of which the last is profiled. The number is that of a trial of foreign problems. Each
pattern must be in the first sentence of the report; one that begins with `!` must not. `| misses: WHY` is for those that are
known not to be named.

A line that ends with `# ill` is what the advice takes away, one that begins with `# well: ` what it puts in. A second case,
named `NAME, cured`, is healthy. A line that ends with `# here` is named, too, with its cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent
NONFINITE = "nonfinite"
"""Fits of all frameworks with a value that is not finite, run with and without `--stop-on-nan`."""
FRAMEWORKS = ("plain", "loops", "fastai", "huggingface", "lightning", "accelerate")
NEEDS = {
    "huggingface": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "fastai": "fastai",
    "plain": "torch",
    NONFINITE: "fastai",
    "loops": "torch",  # plain loops in other shapes: of classes, nested functions and dicts
    "cuda": "torch",  # and a GPU: plain loops whose causes show on one only, run where they are asked for (`make gpu-day`)
}
"""The package that each framework's cases import."""

Verdict = Literal["named", "phase only", "nothing stands out", "wrong", "healthy", "false alarm"]
_NOTHING: Literal["nothing stands out"] = "nothing stands out"
_ILL, _WELL = re.compile(r"(?m)^.*# ill\n?"), re.compile(r"(?m)^( *)# well: ")
_GENERAL = re.compile(r"data-bound|Python-bound|code around the batches|\d+ batch|validation takes|batches are made in the")
"""Sentences that tell where the time goes, and name no line and no object: these blame nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fit. Without `says` it is healthy."""

    framework: str  # the file that it is in
    name: str  # of the case, with its number among the problems of the trial where it comes from there
    says: tuple[str, ...] = ()  # patterns of the first sentence
    cells: tuple[str, ...]  # the last one is profiled
    misses: str = ""  # why its cause is not named; "": it is

    @property
    def imports(self) -> set[str]:
        """Return the packages that its cells import, besides the framework's."""
        return set(re.findall(r"(?m)^(?:import|from) (\w+)", "\n".join(self.cells)))

    @property
    def is_healthy(self) -> bool:
        """Say whether nothing is wrong with it."""
        return not self.says

    def verdict(self, sentence: str) -> Verdict:
        """Return what the first sentence of its report is worth."""
        is_nothing = sentence.startswith(_NOTHING)
        if self.is_healthy:
            return "healthy" if is_nothing else "false alarm"
        if is_nothing:
            return _NOTHING
        if all(_holds(pattern, sentence) for pattern in self.says):
            return "named"
        return "phase only" if _GENERAL.match(sentence) else "wrong"


def _holds(pattern: str, sentence: str) -> bool:
    if pattern.startswith("!"):
        return not re.search(pattern[1:], sentence, re.I)
    return bool(re.search(pattern, sentence, re.I))


def cases_of(framework: str) -> tuple[str, tuple[Case, ...]]:
    """Return the first cell of a framework's notebook, and its cases."""
    common, text = ((FOLDER / f"{name}.cells").read_text() for name in ("common", framework))
    preamble, *parts = re.split(r"(?m)^#: ", text)
    pairs = [_with_cure(_case(framework, part)) for part in parts]
    cured = [case for _, *others in pairs for case in others]
    return common + preamble, (*(first for first, *_ in pairs), *cured)  # a spread of them has both


def _with_cure(case: Case) -> tuple[Case, ...]:
    """Return a case, and after it the same one with the advice taken, where marks say which lines that changes."""
    cells = tuple(_WELL.sub(r"\1", _ILL.sub("", cell)) for cell in case.cells)
    return (
        (case,) if cells == case.cells else (case, replace(case, name=f"{case.name}, cured", says=(), cells=cells, misses=""))
    )


def _case(framework: str, part: str) -> Case:
    head, _, body = part.partition("\n")
    name, *fields = (field.strip() for field in re.split(r" \| ", head))
    named = dict(field.partition(": ")[::2] for field in fields)
    says = tuple(pattern.strip() for pattern in named.get("says", "").split(" & ") if pattern)
    cells = tuple(cell.strip("\n") for cell in re.split(r"(?m)^#-\n", body))
    return Case(framework=framework, name=name, says=(*says, *_lines(cells)), cells=cells, misses=named.get("misses", ""))


def _lines(cells: tuple[str, ...]) -> Iterator[str]:
    """Yield the patterns of the lines that are marked: cells begin with the framework's, the last one with a magic."""
    for number, cell in enumerate(cells, 2):
        for line, text in enumerate(cell.splitlines(), 2 if number == len(cells) + 1 else 1):
            if text.endswith("# here"):
                yield rf"In\[{number}\], line {line}\b"
