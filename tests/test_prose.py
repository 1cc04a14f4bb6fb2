"""Texts that a user meets read as a native wrote them, as far as patterns can tell (`tests/prose.py`)."""

from __future__ import annotations

import pytest

from tests import prose

MADE = ("docs/api.md", "docs/rules.md", "docs/rooms.md")
"""Pages made of docstrings."""

FOR_DEVELOPERS = ("docs/adr/", "docs/architecture.md", "docs/benchmarks.md", "docs/protocol.md", *MADE)
"""Pages that a user seldom reads: the number of hits in them is bounded, and only falls."""

AT_MOST = 211

DOCSTRINGS_AT_MOST = {
    "bare what": 12,
    "preposition which": 7,
    "look": 0,
    "telegram": 1,
    "inverted": 14,
    "idiom": 244,
    "colon": 209,
    "has done": 38,
    "that of": 91,
    "glued": 966,
}
"""Docstrings of the package with each pattern (`python -m tests.prose --docstrings`): the numbers reached, which only fall."""


def test_no_text_for_users_has_such_a_pattern() -> None:
    texts = [text for file in sorted(prose.PACKAGE.rglob("*.py")) for text in prose.strings_of(file)]
    texts += [text for text in prose.pages() if not text.file.startswith(FOR_DEVELOPERS)]

    hits = [f"{text.file}:{text.line}: {name}: {words!r}" for name, text, words in prose.found(iter(texts))]

    assert len(texts) > 4000
    assert not hits, "\n".join(hits)


def test_pages_for_developers_have_no_more_of_them() -> None:
    texts = (text for text in prose.pages() if text.file.startswith(FOR_DEVELOPERS))

    assert len(list(prose.found(texts))) <= AT_MOST


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bare what", "look at what the loop does"),
        ("that of", "a Trainer's precision is that of its arguments"),
        ("preposition which", "leave out batches of which nothing is selected"),
        ("inverted", "`model` is deleted, its 64 MiB are not"),
        ("telegram", "a Learner; none: the environment"),
        ("has done", "In[3] has failed"),
        ("look", "it has changed since the look"),
        ("idiom", "a library beside PyTorch"),
        ("colon", "port 29500 is in use: a launch on it fails"),
    ],
)
def test_each_pattern_is_found(name: str, text: str) -> None:
    found = prose.found(iter([prose.Text("file.py", 1, text)]))

    assert name in {each for each, _, _ in found}


@pytest.mark.parametrize(
    "text",
    [
        "%gpumem shows what each name holds",
        "cannot write it: no permission; name another file",
        "port 29500 is in use, so a launch on it fails",
        "its parent died",
        "it looks like a number",
    ],
)
def test_plain_sentences_are_not(text: str) -> None:
    assert not list(prose.found(iter([prose.Text("file.py", 1, text)])))


def test_docstrings_have_few_of_them() -> None:
    number, counts = prose.docstrings()

    assert {name: count for name, count in counts.items() if count > DOCSTRINGS_AT_MOST[name]} == {}
    assert counts["glued"] <= 0.15 * number
