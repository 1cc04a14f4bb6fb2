"""What differs between two runs: the first sentence names the cause, and what follows from it stands below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.errors import RunRecordError
from nbguard.training.runs.analysis.comparison import RunComparison, compare_records
from nbguard.training.runs.analysis.record import RunFact, RunRecord, Topic
from tests.runs.records import CELLS, run


def test_two_records_of_the_same_differ_in_nothing() -> None:
    assert compare_records(run(), run()).differences == ()
    assert compare_records(run(), run()).sentence.startswith("No difference is on record")


@pytest.mark.parametrize(
    ("topic", "name", "value", "effect"),
    [
        ("seeds", "torch", "43", "changes bits"),
        ("data", "training sizes", "other", "changes bits"),
        ("split", "validation names", "other", "changes bits"),
        ("hyper-parameters", "lr of group 0", "0.003", "changes bits"),
        ("model", "weights", "other", "changes bits"),
        ("loaders", "training batch size", "32", "changes bits"),
        ("loaders", "training workers", "8", "can change bits"),
        ("precision", "float32 matmul", "high", "can change bits"),
        ("generators", "torch", "other", "changes bits"),
        ("code", "module train_tools", "other", "can change bits"),
        ("versions", "torch", "2.14.0", "can change bits"),
        ("hardware", "GPUs", "NVIDIA B, capability 9.0", "can change bits"),
        ("variables", "CUBLAS_WORKSPACE_CONFIG", "(not there)", "can change bits"),
    ],
)
def test_one_change_is_the_cause(topic: Topic, name: str, value: str, effect: str) -> None:
    comparison = compare_records(run(), run((topic, name, value)))

    (only,) = comparison.differences
    assert (only.topic, only.name, only.effect) == (topic, name, effect)
    assert f"{topic}, {name}: " in comparison.sentence
    assert comparison.sentence.endswith(f"→ {value}")


@pytest.mark.parametrize(
    ("topic", "name"),
    [("loaders", "training prefetch"), ("versions", "tqdm"), ("git", "commit"), ("place", "host"), ("data", "newest change")],
)
def test_what_cannot_change_bits_is_no_cause(topic: Topic, name: str) -> None:
    comparison = compare_records(run(), run((topic, name, "other")))

    assert [each.effect for each in comparison.differences] == ["hardly matters"]
    assert comparison.sentence == "Nothing on record that can change bits differs between the two runs"


def test_what_a_seed_decides_follows_from_it() -> None:
    other = run(
        ("generators", "torch", "x"), ("model", "weights", "x"), ("split", "validation names", "x"), ("seeds", "torch", "43")
    )
    comparison = compare_records(run(), other)

    assert comparison.sentence == "Most likely cause: seeds, torch: 42 → 43"
    first, *rest = comparison.differences
    assert first.topic == "seeds"
    assert {(each.topic, each.follows) for each in rest} == {
        ("split", "seeds, torch"),
        ("model", "seeds, torch"),
        ("generators", "seeds, torch"),
    }


def test_runs_without_a_seed_are_told_so() -> None:
    unset: tuple[tuple[Topic, str, str], ...] = (("seeds", "torch", "never set"), ("seeds", "calls", "none"))
    comparison = compare_records(run(*unset), run(*unset, ("generators", "torch", "x"), ("split", "validation names", "x")))

    assert comparison.sentence == "Most likely cause: no seed was set in either run, and each drew its own random numbers"
    assert [each.follows for each in comparison.differences] == ["", "no seed", "no seed"]


def test_a_setting_goes_before_random_numbers_and_code() -> None:
    cells = (*CELLS[:2], replace(CELLS[2], source="learn.fit(3, 3e-3)"))
    changes: tuple[tuple[Topic, str, str], ...] = (
        ("generators", "torch", "x"),
        ("hyper-parameters", "lr of group 0", "0.003"),
        ("versions", "torch", "2.14.0"),
    )
    comparison = compare_records(run(), run(*changes, cells=cells))

    assert (
        comparison.sentence == "Most likely cause: hyper-parameters, lr of group 0: 0.001 → 0.003; 3 more that can change bits"
    )
    assert [each.topic for each in comparison.differences] == ["hyper-parameters", "generators", "code", "versions"]
    code = comparison.differences[2]
    assert (code.name, code.before, code.after) == ("In[3]", "learn.fit(3, 1e-3)", "learn.fit(3, 3e-3)")


def test_the_same_cells_under_other_numbers_are_the_same() -> None:
    assert compare_records(run(), run(cells=tuple(replace(cell, number=cell.number + 10) for cell in CELLS))).differences == ()


def test_a_cell_that_only_one_run_has_is_named() -> None:
    more = (*CELLS[:2], replace(CELLS[1], number=7, source="learn.unfreeze()"), CELLS[2])
    (only,) = compare_records(run(), run(cells=more)).differences

    assert (only.name, only.before, only.after) == ("In[7]", "(not there)", "learn.unfreeze()")


def test_what_is_not_known_is_said_and_is_no_difference() -> None:
    comparison = compare_records(run(), run(without=("training sizes",), cells=()))

    assert comparison.differences == ()
    assert comparison.notes == (
        "not compared: data, training sizes is not known of one run only (nobody could read it)",
        "not compared: the cells, as one of the two was not a notebook",
    )


def test_a_record_comes_back_from_its_json() -> None:
    record = run(without=("training items",))

    assert RunRecord.from_data(record.to_data()) == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "report"}, "it holds no record of a run"),
        ({"facts": 3}, "'facts' should be a list"),
        ({"facts": [{"topic": "seeds", "name": "a", "value": 3}]}, "'facts\\[0\\].value' should be str"),
        ({"facts": [{"topic": "weather", "name": "a", "value": "b"}]}, "'facts\\[0\\].topic' should be one of seeds, data"),
        ({"cells": [{"number": "1", "source": "", "role": "", "edited": ""}]}, "'cells\\[0\\].number' should be int"),
        ({"cells": [{"number": -1, "source": "", "role": ""}]}, "'cells\\[0\\].number' should be from 0"),
        ({"diff": None}, "'diff' should be str"),
        ({"seconds": float("nan")}, "'seconds' should be from 0"),
        ({"weather": 1}, "a field 'weather' that this version of nbguard does not know"),
    ],
)
def test_damaged_records_are_refused_in_a_line(change: dict[str, object], words: str) -> None:
    with pytest.raises(RunRecordError, match=words) as raised:
        RunRecord.from_data(run().to_data() | change)
    assert "\n" not in str(raised.value)


def test_it_shows_itself() -> None:
    comparison: RunComparison = compare_records(run(), run(("seeds", "torch", "43"), ("place", "host", "<b>there")))
    text, html = (comparison.mimebundle()[kind] for kind in ("text/plain", "text/html"))

    assert text.splitlines()[0] == "Most likely cause: seeds, torch: 42 → 43"
    assert "&lt;b&gt;there" in html
    assert "<b>there" not in html
    shown = run().mimebundle()["text/plain"]
    assert "edited since" in shown
    assert "2 lines" in shown
    assert RunFact("seeds", "torch", "42") in run().facts
