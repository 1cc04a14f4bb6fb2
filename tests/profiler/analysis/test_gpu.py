"""How busy a GPU was, on timelines of a simple GPU: one queue, served in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.gpu import GpuMark, gpu_facts, lags

MS = 1_000_000
LATENCY = 8_000  # ns from the end of the work before an event until it is done

Phase = tuple[str, float, float, int, bool]
"""Its name, milliseconds of the host, of the GPU, in how many pieces, and whether the host waits for the GPU at its end."""


def timeline(batch: list[Phase], batches: int = 40, drift: float = 0.0, offset: int = 7_000_000_000) -> list[GpuMark]:
    host = done = 0.0
    marks = [GpuMark(1, "", 0, offset + LATENCY)]
    for number in range(1, batches + 1):
        for phase, host_ms, gpu_ms, pieces, waits in batch:
            for _ in range(pieces):
                host += host_ms * MS / pieces
                if gpu_ms:
                    done = max(done, host) + gpu_ms * MS / pieces
            if waits:
                host = max(host, done)
            at = max(host, done) + LATENCY
            marks.append(GpuMark(number, phase, round(host), round(at * (1 + drift)) + offset))
    return marks


GPU_BOUND = [
    (phase_log.WAIT, 0.1, 0, 1, False),
    (phase_log.FORWARD, 1, 8, 20, False),
    (phase_log.BACKWARD, 1, 16, 20, False),
    (phase_log.STEP, 0.5, 2, 10, False),
    (phase_log.OTHER, 0.1, 0, 1, True),
]
STARVED = [(phase_log.WAIT, 30, 0, 1, False), *GPU_BOUND[1:]]
PYTHON_BOUND = [
    (phase_log.WAIT, 0.1, 0, 1, False),
    (phase_log.FORWARD, 8, 0.8, 200, False),
    (phase_log.BACKWARD, 8, 0.8, 200, False),
    (phase_log.STEP, 2, 0.2, 50, False),
    (phase_log.OTHER, 1, 0, 1, False),
]


@pytest.mark.parametrize("drift", [0.0, 1e-5, -1e-5])
@pytest.mark.parametrize("waits", [True, False])
def test_a_gpu_that_has_enough_to_do_is_busy(drift: float, waits: bool) -> None:
    batch = [(*phase[:4], phase[4] and waits) for phase in GPU_BOUND]
    facts = gpu_facts(timeline(batch, batches=200, drift=drift))
    assert facts.busy is not None
    assert facts.busy > 0.95
    found = dict(facts.phases)
    assert found[phase_log.FORWARD] == pytest.approx(8 * MS, rel=0.05)
    assert found[phase_log.BACKWARD] == pytest.approx(16 * MS, rel=0.05)
    assert found[phase_log.STEP] == pytest.approx(2 * MS, rel=0.05)


@pytest.mark.parametrize("drift", [0.0, 1e-5, -1e-5])
def test_a_gpu_that_waits_for_data_is_idle(drift: float) -> None:
    facts = gpu_facts(timeline(STARVED, batches=4000, drift=drift))  # by its end the clocks are 2.2 ms apart
    assert facts.idle == pytest.approx(30 / 56, abs=0.03)
    assert facts.busy == pytest.approx(26 / 56, abs=0.03)
    assert phase_log.WAIT not in dict(facts.phases)


def test_a_gpu_that_is_given_small_pieces_is_paced() -> None:
    facts = gpu_facts(timeline(PYTHON_BOUND))
    assert facts.busy is not None
    assert facts.busy < 0.05
    assert facts.paced == pytest.approx(18 / 19.1, abs=0.03)
    assert "in another 94% it worked on small pieces as the program gave them" in facts.note


def test_a_wait_that_the_gpu_fills_with_work_is_no_idleness() -> None:
    batch = [(phase_log.WAIT, 20, 0, 1, False), *GPU_BOUND[1:4]]  # the loader waits while the GPU still works: 26 ms of 26
    facts = gpu_facts(timeline(batch))
    assert facts.busy is not None
    assert facts.busy > 0.95


def test_the_shares_add_up() -> None:
    for batch in (GPU_BOUND, STARVED, PYTHON_BOUND):
        facts = gpu_facts(timeline(batch))
        assert (facts.busy or 0) + (facts.paced or 0) + (facts.idle or 0) == pytest.approx(1)


def test_what_was_not_followed_is_no_stretch() -> None:
    marks = [mark for mark in timeline(GPU_BOUND) if mark.batch <= 8 or mark.batch % 8 == 0]
    cut = [
        GpuMark(mark.batch, "" if at and mark.batch - marks[at - 1].batch > 1 else mark.phase, mark.host, mark.gpu)
        for at, mark in enumerate(marks)
    ]
    found = dict(gpu_facts(cut).phases)
    assert found[phase_log.FORWARD] == pytest.approx(8 * MS, rel=0.05)


def test_validation_is_left_out() -> None:
    """Its forward passes have other sizes, and its end asks for a batch in vain."""
    validation = [(phase_log.WAIT, 40, 0, 1, False), (phase_log.FORWARD, 1, 3, 1, False), (phase_log.OTHER, 0.1, 0, 1, True)]
    marks = timeline(GPU_BOUND)
    last = marks[-1]
    marks += [
        GpuMark(mark.batch + 40, mark.phase, last.host + mark.host, last.gpu + mark.gpu - marks[0].gpu)
        for mark in timeline(validation, batches=100)
    ]
    assert dict(gpu_facts(marks).phases)[phase_log.FORWARD] == pytest.approx(8 * MS, rel=0.05)
    assert gpu_facts(marks).busy == pytest.approx(gpu_facts(timeline(GPU_BOUND)).busy, abs=0.01)


def test_too_little_is_not_known() -> None:
    assert gpu_facts([]).busy is None
    assert gpu_facts([], why_not="the fit did not use a CUDA device").note == "the fit did not use a CUDA device"
    assert gpu_facts(timeline(GPU_BOUND, batches=5)).busy is None
    assert gpu_facts(timeline(GPU_BOUND, batches=6)).busy is not None
    assert gpu_facts([], used=(0.25, 0.75)).used == 0.5


def test_lags_are_of_the_least() -> None:
    marks = [GpuMark(1, "", at * MS, at * MS + 5 * MS + late) for at, late in enumerate((0, 700_000, 0))]
    assert lags(marks) == [0, 700_000, 0]


@pytest.mark.parametrize("ppm", [-50, -20, 0, 30])
def test_clocks_may_part(ppm: int) -> None:
    marks = [GpuMark(at, "", at * MS, round(at * MS * (1 + ppm / 1e6)) + 3_000_000 * (at % 4 == 0)) for at in range(60_000)]
    found = lags(marks)
    assert max(abs(lag - 3_000_000 * (at % 4 == 0)) for at, lag in enumerate(found)) < 1_000


RECORDED = json.loads(gzip.decompress((Path(__file__).parents[2] / "data/profile/gpu_marks.json.gz").read_bytes()))
"""Fits on an H100: events as they were recorded, and the share of time in which kernels ran by CUPTI, in another run.

The host's times were taken just after each event was put into the stream: the few that were late, by up to 1.1 ms, are left
out.
"""


@pytest.mark.parametrize("fit", RECORDED, ids=lambda fit: fit["fit"])
def test_what_is_busy_is_what_a_real_gpu_did(fit: dict[str, Any]) -> None:
    facts = gpu_facts([GpuMark(*mark) for mark in fit["marks"]])
    assert facts.busy is not None
    assert facts.paced is not None
    assert facts.busy - 0.05 <= fit["kernels"] <= facts.busy + facts.paced + 0.01
