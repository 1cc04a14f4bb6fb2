"""Each fault that a file of a stranger has once set off, and others of its kind, does so no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.bounds import in_bounds
from tests.fuzz.faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_a_file_once_set_off(fault: str, tmp_path: Path) -> None:
    in_bounds("tests.fuzz.faults", fault, str(tmp_path))
