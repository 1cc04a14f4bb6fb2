"""Questions about typing mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbguard
from nbguard.spelling import did_you_mean, none_of, unknown_arguments


@pytest.mark.parametrize(
    ("word", "known", "question"),
    [
        ("lern", ["learn", "dls"], "did you mean learn?"),
        ("LOSSES", ["losses"], "did you mean losses?"),
        ("dryrun", ["--dry-run", "--all"], "did you mean --dry-run?"),
        ("zzz", ["learn"], ""),
        ("→", ["learn"], ""),
        ("x", [], ""),
    ],
)
def test_a_question_names_what_looks_like_the_word(word: str, known: list[str], question: str) -> None:
    assert did_you_mean(word, known) == question


def test_a_question_may_name_several() -> None:
    assert did_you_mean("RTX309", ["RTX3090", "RTX3090TI", "T4"], most=2) == "did you mean RTX3090 or RTX3090TI?"


def test_an_option_is_compared_with_options_alone() -> None:
    assert unknown_arguments(["--jsno"], ["--json", "-n"]).endswith("--jsno: did you mean --json?")
    assert unknown_arguments(["json"], ["--json"]) == "unrecognized arguments: json"
    assert unknown_arguments(["--basz=4"], ["--bas", "--json"]).endswith("did you mean --bas?")


def test_a_word_that_is_none_of_a_few_is_told_with_all_of_them() -> None:
    assert none_of("of", ["on", "off"]) == "'of' is not one of on, off"


def test_one_module_looks_for_similar_words() -> None:
    package = Path(nbguard.__file__).parent
    users = [file.name for file in package.rglob("*.py") if "get_close_matches" in file.read_text(encoding="utf-8")]

    assert users == ["spelling.py"]
