"""Recorded facts of planted faults, on two and four ranks of gloo: the rank, the collective and the line are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nbguard.render.text import blocks_text
from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.facts import JobFacts, from_text, to_text

DATA = Path(__file__).parents[1] / "data" / "ranks"
CASES = [json.loads(line) for line in gzip.decompress((DATA / "faults.jsonl.gz").read_bytes()).decode().splitlines()]


def job(case: dict[str, Any]) -> JobFacts:
    return JobFacts(case["world"], tuple(from_text(json.dumps(facts)) for facts in case["facts"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['world']}")
def test_the_cause_is_named(case: dict[str, Any]) -> None:
    diagnosis = diagnosed(job(case))
    cause = diagnosis.faults[0]

    assert cause.kind in case["kinds"]
    assert list(cause.ranks) == case["ranks"]
    if case["collective"]:
        assert cause.collective == case["collective"]
    if case["lines"]:
        assert cause.place.partition(" in ")[0] in case["lines"]
    assert all(f"rank {rank}" in cause.what or f"{rank}" in cause.what for rank in case["ranks"])
    assert cause.remedy
    assert "DETAIL" not in blocks_text(tuple(diagnosis.blocks()))


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: f"{case['name']}-{case['world']}")
def test_facts_survive_json(case: dict[str, Any]) -> None:
    for facts in job(case).ranks:
        assert from_text(to_text(facts)) == facts


def test_both_worlds_have_all_faults() -> None:
    assert {case["world"] for case in CASES} == {2, 4}
    assert len(CASES) >= 2 * 24
