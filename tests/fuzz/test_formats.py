"""Files of each format by a seed end in a result or in the documented error, within bounds, and nothing of them is run.

An ordinary run makes a few of each, `make fuzz` many.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fuzz.bounds import in_bounds
from tests.fuzz.formats import FORMATS

_FIRST = int(os.environ.get("NBGUARD_FUZZ_FROM", "0"))
_ROUNDS = range(_FIRST, _FIRST + int(os.environ.get("NBGUARD_FUZZ", "1")))


@pytest.mark.parametrize("round_", _ROUNDS)
@pytest.mark.parametrize("name", FORMATS)
def test_files_of_strangers_are_shown_or_refused_within_bounds(name: str, round_: int, tmp_path: Path) -> None:
    files = FORMATS[name].files

    ends = json.loads(in_bounds("tests.fuzz.looks", name, str(round_ * files), str(files), str(tmp_path)).splitlines()[-1])

    assert sum(ends.values()) == files
    assert "shown" in ends or name in ("opcodes", "archives")
    assert "refused" in ends or name == "NCCL logs"
