"""What is said of the simulated device: golden text, and the same in HTML."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from nbguard.memory.core.device_view import cell_line
from nbguard.memory.core.simulated import Simulated, SimulationState
from nbguard.testing import make_segment
from tests.render.test_render import _golden

MIB = 1024**2
_BEFORE = Simulated(
    capacity=16 * 1024 * MIB,
    context=500 * MIB,
    settings="expandable_segments:True",
    torch_version="2.13.0",
    allocated=3 * MIB,
    reserved=22 * MIB,
    peak_allocated=9 * MIB,
    peak_reserved=40 * MIB,
    free=15_862 * MIB,
    allocations=12,
    frees=9,
    retries=0,
    ooms=0,
    segments=(
        make_segment((2 * MIB, "inactive"), small=True),
        make_segment((3 * MIB, "active_allocated"), (17 * MIB, "inactive"), address=1 << 30),
    ),
)
_AFTER = replace(_BEFORE, allocated=5 * MIB, peak_allocated=14 * MIB, ooms=2, broken="the figures end here", unseen=1)


def test_golden_simulation(request: pytest.FixtureRequest) -> None:
    first, then, plain = (
        SimulationState("simulated from the next cell on: 16 GiB", _BEFORE),
        SimulationState("no longer simulated", _AFTER),
        SimulationState("simulated", replace(_BEFORE, settings="", context=0)),
    )
    lines = [cell_line(_BEFORE, _AFTER, 7), cell_line(_AFTER, replace(_AFTER, allocated=MIB, peak_reserved=22 * MIB), 8)]

    _golden("simulate.txt", "\n\n".join([*(each.mimebundle()["text/plain"] for each in (first, then, plain)), *lines]), request)


def test_the_html_says_what_the_text_says() -> None:
    bundle = SimulationState("no longer simulated", _AFTER).mimebundle()

    assert all(escape(line.strip()) in bundle["text/html"] for line in bundle["text/plain"].splitlines())
