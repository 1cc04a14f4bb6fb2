"""What-ifs: settings that would have helped are named, and where none would have, what to free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.replay.view import whatif_blocks
from nbguard.memory.allocator.replay.whatif import WhatIf, WhatIfRow, notes, recommendation, what_if
from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.render.text import blocks_text
from tests.allocator.test_replay import new_model, raw_snapshot, snapshot_of

MIB = 2**20


def fragmented(rounds: int = 8) -> CachingAllocator:
    """Each round strands more than 10 MiB of a classic segment behind a block of 19 MiB: 200 MiB are too few for eight."""
    model = new_model(capacity=200 * MIB)
    for number in range(rounds):
        try:
            model.free(model.malloc((30 + 2 * number) * MIB))
        except SimulatedOutOfMemoryError:
            continue
        model.malloc(19 * MIB)
    return model


def of(model: CachingAllocator, *confs: str, version: str | None = "2.11", stacks: bool = False) -> WhatIf:
    raw = raw_snapshot(model)
    if stacks:
        inner = {"filename": "/lib/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"}
        for number, event in enumerate(raw["device_traces"][0]):
            event["frames"] = [inner, {"filename": "/home/ada/train.py", "line": number % 2, "name": "step"}]
    return what_if(snapshot_of(raw, version), 0, confs)


def test_a_setting_that_would_have_helped_is_named() -> None:
    found = of(fragmented())
    base, *others = found.rows

    assert base.is_recorded
    assert base.worst.refusal is not None
    assert found.capacity == 200 * MIB
    helpful = [row.settings.conf() for row in others if row.worst.refusal is None]
    assert "expandable_segments:True" in helpful
    said = recommendation(found)
    assert said.startswith("Set PYTORCH_ALLOC_CONF=expandable_segments:True: request ")
    assert "would find room" in said
    assert next(row for row in others if row.settings.expandable).worst.passed >= 1


def test_the_defaults_are_had_by_unsetting_the_variable() -> None:
    conf = "large_segment_size_mb:64"
    model = new_model(conf)
    model.malloc(2 * MIB)

    found = what_if(snapshot_of(raw_snapshot(model, conf=conf), "2.11"), 0, [""])

    said = "Unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, for the defaults: at most 20 MiB would be reserved"
    assert recommendation(found).startswith(said)
    assert "\n  1 request\n" in blocks_text(whatif_blocks(found, "run.pickle"))


def test_what_came_before_the_trace_is_blamed_where_it_is_to_blame() -> None:
    model = fragmented()
    cut = next(index for index, event in enumerate(model.events) if event[0] == "oom")

    found = what_if(snapshot_of(raw_snapshot(model, cut=cut), "2.11"), 0)

    assert found.replay.is_exact
    assert recommendation(found).startswith("From a fresh start the failed request also finds room")
    assert any("The trace begins with" in note for note in notes(found))


def test_a_larger_device_is_named_as_the_reason_why_a_request_finds_room() -> None:
    found = what_if(snapshot_of(raw_snapshot(fragmented()), "2.11"), 0, capacity=400 * MIB)

    assert recommendation(found).startswith("With 400 MiB instead of 200 MiB the failed request finds room under the recorded")


def test_where_none_helps_it_says_what_to_free() -> None:
    model = new_model(capacity=100 * MIB)
    for _ in range(4):
        model.malloc(20 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError):
        model.malloc(50 * MIB)

    found = of(model, stacks=True)
    said = recommendation(found)

    assert said.startswith("No setting here helps: request 5 of 5 (50 MiB) finds no room, nor under any of these settings.")
    assert "80 MiB of 100 MiB were in use then: at least 30 MiB must be freed before" in said
    assert "from train.py:" in said
    assert "linear.py" not in said


def test_where_nothing_is_to_be_won_the_settings_stay() -> None:
    model = new_model()
    for _ in range(5):
        model.malloc(20 * MIB)

    found = of(model)

    assert recommendation(found).startswith("Keep the settings")
    assert found.capacity is None
    assert any("--capacity" in note for note in notes(found))


def test_a_saving_is_counted_from_the_least_that_the_recorded_settings_may_take() -> None:
    found = of(fragmented(2))
    base, *others = found.rows
    better = WhatIfRow(others[0].settings, (replace(base.worst, peak_reserved=100 * MIB),))
    orders = tuple(replace(base.worst, peak_reserved=peak) for peak in (125 * MIB, 200 * MIB))

    sentence = recommendation(replace(found, rows=(replace(base, outcomes=orders), better)))

    assert "at most 100 MiB would be reserved instead of at least 125 MiB, 20% less; " in sentence


def test_the_trap_is_warned_of() -> None:
    found = of(fragmented(2), "expandable_segments:True,max_split_size_mb:64")

    assert len(found.rows) == 2
    assert any("is a trap" in note for note in notes(found))


def test_the_recorded_settings_come_out_as_recorded() -> None:
    model = fragmented()
    recorded_peak, ooms = model.peak_reserved, model.num_ooms

    found = of(model)

    assert found.replay.is_exact
    assert found.rows[0].peak == found.rows[0].least_peak == recorded_peak == found.replay.peak_reserved
    assert found.rows[0].worst.retries == model.num_alloc_retries
    assert ooms >= 1


def test_what_the_file_does_not_say_is_noted() -> None:
    found = of(fragmented(2), version=None)

    assert any("give --torch" in note for note in notes(found))
    assert recommendation(found).count("PYTORCH_ALLOC_CONF") == 0


def test_runs_end_where_only_they_run_out() -> None:
    model = new_model()
    model.free(model.malloc(40 * MIB))
    model.malloc(60 * MIB)
    model.malloc(70 * MIB)

    refusal = what_if(snapshot_of(raw_snapshot(model), "2.13"), 0, [""], capacity=100 * MIB).rows[0].worst.refusal

    assert refusal is not None
    assert (refusal.number, refusal.size, refusal.allocated) == (3, 70 * MIB, 60 * MIB)


def test_progress_is_told_for_each_run() -> None:
    told: list[tuple[int, int]] = []
    snapshot: Snapshot = snapshot_of(raw_snapshot(fragmented(2)), "2.13")

    what_if(snapshot, 0, ["expandable_segments:True"], progress=lambda done, total: told.append((done, total)))

    assert told == [(1, 2), (2, 2)]
