"""Patterns of English that a reader stumbles over, found in all texts that a user meets: `python -m tests.prose [ROOM...]`.

Texts are the string literals of the package, the golden texts, README, the changelog and the pages of docs/.
`--docstrings [ROOM...]` counts those of the package, and lists the hits in the named rooms.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nbguard"

_VERB = (
    r"(?:is|are|was|were|isn't|aren't|has|have|had|does|do|did|can|cannot|could|will|would|may|must|needs?|takes?|took|makes?|made"
    r"|gives?|gave|holds?|held|keeps?|kept|comes?|came|goes|went|frees?|fails?|failed|waits?|uses?|used|knows?|brings?|stays?)"
)
_SUBJECT = (
    r"(?:it|its|they|their|this|that|these|those|the|a|an|each|every|no|all|both|some|another|other|nothing|none|nobody"
    r"|what|who)"
)
_PLACE = r"[\w`'\"().\[\]%=-]+ "
_ASKS = (
    "about",
    "ask",
    "asks",
    "decides",
    "exactly",
    "explain",
    "explains",
    "know",
    "knows",
    "list",
    "lists",
    "names",
    "said",
    "say",
)
_ASKS += ("Say", "says", "see", "show", "Show", "shows", "tell", "tells")
_DONE = r"failed|ended|left|come|gone|met|begun|died|fallen|broken|given|lost|stopped|set|taken|closed|run out"
_WHOSE_LOOK = r"a|the|each|every|one|last|next|first|its|second|this|between|of|at|earlier|previous|long|short|later"
_IDIOMS = (
    "besides?",
    "so many",
    "so much hangs",
    "nobody",
    "in vain",
    "anew",
    "foreseen?",
    "worth a word",
    "goe?s? with",
    "stands? (?:behind|before|above|alone|still|already)",
    "on its way out",
    "come further",
    "others than",
    "otherwise than",
    "as it did",
    "believes? to",
    "is none of",
    "(?<!there )is none(?! [a-z])",
)

PATTERNS = {
    "bare what": "".join(rf"(?<!\b{word} )" for word in _ASKS)
    + r"(?<!-)\b[Ww]hat\b(?! (?:to|if|helps|about)\b)(?=,? [\w`%*])(?![^.:;]*\?)",
    "that of": r"\b(?:that|those) of\b(?! (?:the|this|these) \w+ing\b)",
    "preposition which": r"\b(?:of|by|in|for|from|with|to|after|before|under|through) (?:which|whose)\b",
    "inverted": r"\b(?:is|are|was|were) (?:those|that (?:of|which))\b|\bits [\d.]+ [KMG]iB are\b"
    r"|\bof (?:it|them) [\d.,]+ \w+\b|\b[KMG]iB of it are\b",
    "telegram": r"(?:^|[;,.(] ?)(?:[Nn]one|empty|0|null)(?:,? otherwise)?: ",
    "has done": rf"\b(?:has|have|had) (?:{_DONE})\b(?! (?:yet|already|since)\b)",
    "look": rf"\b(?:{_WHOSE_LOOK}) looks?\b(?! like\b)|\b(?:is|are|was|were|been|not) looked (?:at|into)\b|\bof looking\b",
    "idiom": rf"\b(?:{'|'.join(_IDIOMS)})\b",
    "colon": rf"(?:{_PLACE}){{1,12}}?{_VERB}\b[^:.;`·]*?: {_SUBJECT} (?:{_PLACE}){{0,6}}?{_VERB}\b",
}
"""Regular expressions by the name of the pattern; a text is searched as one line."""

_TWICE = re.compile(r"\b[Ww]hat\b[^.;:|?]*\bwhat\b")
"""In a page a clause with one "what" reads well; two in one sentence do not."""


@dataclass(frozen=True)
class Text:
    """A text that a user may meet, as one line."""

    file: str
    line: int
    text: str


def _literal(node: ast.AST) -> str | None:
    """Return the text of a string, of an f-string with a word for each value in it, or of a sum of such; None for all else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "losses" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is None and right is None else f"{left or 'losses'}{right or 'losses'}"
    return None


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each string below a node with its line, but for docstrings and strings below constants."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = _literal(node)
    if text is not None:
        yield getattr(node, "lineno", 0), text
        for inner in ast.walk(node):
            if isinstance(inner, ast.FormattedValue):
                yield from _strings(inner.value)
        return
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


def strings_of(file: Path) -> Iterator[Text]:
    """Yield the strings of a module that read as prose: three words and more."""
    for line, text in _strings(ast.parse(file.read_bytes())):
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text and not re.search(r"\\[dwbsS(.]", text):
            yield Text(str(file.relative_to(ROOT)), line, " ".join(text.split()))


def pages() -> Iterator[Text]:
    """Yield the paragraphs of the pages, without code blocks, and each line of the golden texts."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for file in files:
        text = re.sub(r"^( *)(```+).*?^ *\2 *$", lambda match: "\n" * match[0].count("\n"), file.read_text(), flags=re.M | re.S)
        line = 1
        for paragraph in re.split(r"(\n(?:[ \t]*\n|(?=[ \t]*[-*|#]))+)", text):
            if paragraph.strip():
                yield Text(str(file.relative_to(ROOT)), line, " ".join(paragraph.split()))
            line += paragraph.count("\n")
    for file in sorted((ROOT / "tests" / "golden").glob("*.txt")):
        for number, row in enumerate(file.read_text().splitlines(), 1):
            yield Text(str(file.relative_to(ROOT)), number, " ".join(row.split()))


def found(texts: Iterator[Text]) -> Iterator[tuple[str, Text, str]]:
    """Yield (name of the pattern, text, the words that match) for each hit."""
    patterns = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
    for text in texts:
        for name, pattern in patterns.items():
            if name == "bare what" and text.file.endswith(".md"):
                pattern = _TWICE
            for match in pattern.finditer(text.text):
                yield name, text, match[0]


def docstring_texts() -> Iterator[Text]:
    """Yield the docstrings of the package, also those below constants."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield Text(str(file.relative_to(ROOT)), node.lineno, node.value.value.strip())


def docstrings() -> tuple[int, Counter[str]]:
    """Return how many docstrings the package has, and how many have each pattern.

    "glued" counts those whose first line has a colon in its middle.
    """
    patterns = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
    texts = [each.text for each in docstring_texts()]
    counts = Counter(name for text in texts for name, pattern in patterns.items() if pattern.search(" ".join(text.split())))
    counts["glued"] = sum(bool(re.search(r"\w: \w", text.partition("\n")[0])) for text in texts)
    return len(texts), counts


def main() -> None:
    """Print each hit; with names of rooms or files, theirs only.

    With --docstrings print those in docstrings of the named rooms or files, and how many docstrings have each pattern.
    """
    names = [name for name in sys.argv[1:] if name != "--docstrings"]
    if "--docstrings" in sys.argv:
        texts = [Text(each.file, each.line, " ".join(each.text.split())) for each in docstring_texts() if names]
    else:
        texts = [text for file in sorted(PACKAGE.rglob("*.py")) for text in strings_of(file)] + list(pages())
    chosen = [text for text in texts if not names or any(text.file.startswith(name) for name in names)]
    hits = list(found(iter(chosen)))
    for name, text, words in hits:
        print(f"{text.file}:{text.line}: {name}: {words!r} in {text.text[:200]!r}")
    print(*(docstrings() if "--docstrings" in sys.argv else (Counter(name for name, _, _ in hits), len(hits))))


if __name__ == "__main__":
    main()
