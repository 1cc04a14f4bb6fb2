"""Random programs: whatever nbguard prints is followed as printed, and nothing that a live name needs is lost by it.

By hand, some of them: NBGUARD_PROGRAMS_FROM=300 pytest tests/zoo/test_programs.py. All 510: NBGUARD_THOROUGH=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.thorough import THOROUGH, fewer_in_ci

_FIRST = int(os.environ.get("NBGUARD_PROGRAMS_FROM", "0"))
_AT_ONCE = 15
_COUNT = 510 if THOROUGH else fewer_in_ci(30)
"""Programs: each takes some 2.5 s of a core, and the start of so many at once 5 s. Each follows some 25 commands."""


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", range(_FIRST, _FIRST + _COUNT, _AT_ONCE))
def test_commands_that_are_printed_take_nothing_that_is_needed_and_free_what_they_say(first: int) -> None:
    argv = [sys.executable, "-m", "tests.zoo.programs", str(first), str(_AT_ONCE)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    output = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=3000, check=True).stdout

    results = [json.loads(line) for line in output.splitlines()]

    assert [result["seed"] for result in results] == [*range(first, first + _AT_ONCE)]
    assert sum(result["followed"] for result in results) > 10 * _AT_ONCE
    wrong = [text for result in results for text in result["wrong"]]
    assert not wrong, "\n".join(wrong)
