"""What the airbag says: each figure where it is known, and no sentence on what did not happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.room.spill import AirbagState, Spill, spill_sentence

GIB = 1024**3
SPILL = Spill(device="cuda:0", most=2 * GIB)


@pytest.mark.parametrize(
    ("spill", "has", "lacks"),
    [
        (SPILL, ["2 GiB", "cuda:0", "nothing is left"], ["from `", "batch", "stale"]),
        (replace(SPILL, moved=2 * GIB), ["on the device again"], ["nothing is left"]),
        (replace(SPILL, left=GIB, holders=("opt", "net", "x", "y", "z")), ["1 GiB", "`opt`, `net`, `x` and 2 more"], ["again"]),
        (replace(SPILL, left=GIB, reason="another thread computes"), ["(another thread computes)"], ["of `"]),
        (replace(SPILL, line="learn.fit(1)", batch=(64, 48)), ["from `learn.fit(1)` on", "48 instead of 64"], []),
        (replace(SPILL, freed=GIB, moved=GIB), ["1 GiB of stale memory"], []),
        (replace(SPILL, most=0, moved=GIB), ["1 GiB moved", "room again"], ["did not fit"]),
    ],
)
def test_a_sentence_says_what_is_known(spill: Spill, has: list[str], lacks: list[str]) -> None:
    said = spill_sentence(spill, 7)

    assert said.startswith("In[7]: ")
    assert "\n" not in said
    assert [words for words in has if words not in said] == []
    assert [words for words in lacks if words in said] == []


@pytest.mark.parametrize(
    ("state", "command"),
    [
        (AirbagState(device=""), "%gpumem airbag 4GiB"),
        (AirbagState(device="cuda:0", size=4 * GIB, spilled=GIB, holders=("x",)), "%gpumem airbag off"),
        (AirbagState(device="cuda:1", size=4 * GIB, is_limited=True), "set_per_process_memory_fraction(1.0, 'cuda:1')"),
    ],
)
def test_a_state_has_the_command_that_changes_it(state: AirbagState, command: str) -> None:
    assert command in state.mimebundle()["text/plain"]
