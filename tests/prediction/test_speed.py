"""The time of an epoch on another GPU: its error against public throughputs, and what is said where it is not known."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.predictions import with_epoch_times
from nbguard.training.prediction.prediction import GpuComparison
from nbguard.training.prediction.speed import ERROR, MeasuredFit, epoch_time, figures_of, speed
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.analysis.report import EpochRow
from nbguard.training.profiler.files import read_observations
from tests.render.test_prediction import FITS, GPUS

DATA = Path(__file__).parents[1] / "data"
MS = 1_000_000
FIT = MeasuredFit(
    title="In[7] · ResNet",
    gpu="NVIDIA H100 80GB HBM3",
    step=40 * MS,
    busy=0.75,
    items=64,
    validation=0,
    loader=0,
    precision="half precision",
)


@pytest.mark.parametrize("precision", ["half precision", "TensorFloat-32"])
def test_nine_of_ten_public_throughputs_lie_within_the_error(precision: str) -> None:
    lines = (DATA / "throughputs.txt").read_text(encoding="utf-8").splitlines()
    table = [line.split(" | ") for line in lines if line.startswith(precision)]
    rows = {gpu: [float(each) for each in figures] for _, gpu, *figures in table}
    assert len(rows) == 11
    held = []
    for here, there in permutations(rows, 2):
        low, high = speed(figures_of(here), figures_of(there), precision)
        assert high / low == pytest.approx(ERROR**2)
        held += [low <= after / before <= high for before, after in zip(rows[here], rows[there], strict=True)]
    assert len(held) == 1100
    assert sum(held) / len(held) >= 0.9


def test_the_program_and_the_loader_get_no_faster() -> None:
    there = epoch_time(FIT, "B200", 1000, 64)
    slower, faster = speed(figures_of(FIT.gpu), figures_of("B200"), "half precision")
    assert (there.least, there.most) == (round(1000 * (10 + 30 / faster) * MS), round(1000 * (10 + 30 / slower) * MS))
    assert epoch_time(replace(FIT, loader=35 * MS), "B200", 1000, 64).least == 35_000 * MS
    measured = epoch_time(replace(FIT, validation=500 * MS), "H100", 1000, 64, price=3.6)
    assert measured.least == measured.most == 40_500 * MS
    assert measured.least_price == pytest.approx(40.5 / 3600 * 3.6)
    assert any("T4" in limit for limit in epoch_time(FIT, "T4", 1000, 64).limits)  # it is not among those tried
    both = epoch_time(replace(FIT, precision="float32 and TensorFloat-32"), "V100", 1000, 64)
    ends = [epoch_time(replace(FIT, precision=each), "V100", 1000, 64) for each in ("float32", "TensorFloat-32")]
    assert (both.least, both.most) == (min(each.least for each in ends), max(each.most for each in ends))


@pytest.mark.parametrize(
    ("change", "gpu", "items", "why"),
    [
        ({"gpu": ""}, "T4", 64, "ran on no GPU"),
        ({"gpu": "Some GPU"}, "T4", 64, "ran on Some GPU"),
        ({"busy": None}, "T4", 64, "too few batches"),
        ({}, "T4", 128, "batches of 64, not 128"),
        ({}, "a GPU of 16 GiB", 64, "name a model"),
    ],
)
def test_no_time_is_made_up(change: dict[str, object], gpu: str, items: int, why: str) -> None:
    found = epoch_time(replace(FIT, **change), gpu, 1000, items, price=1)
    assert (found.least, found.most, found.least_price) == (None, None, None)
    assert why in found.note
    assert "\n" not in found.note


def test_a_profile_gives_the_times_of_a_table_with_the_prices_that_were_given() -> None:
    report = build_fit_report(read_observations(DATA / "profile" / "fastai.json"))
    gpus = replace(
        GPUS,
        fits=tuple(
            replace(fit, prediction=replace(fit.prediction, gpu=gpu))
            for fit, gpu in zip(GPUS.fits, ("T4", "RTX2070"), strict=True)
        ),
    )
    [*unknown] = with_epoch_times(gpus, report, []).fits
    assert all("ran on no GPU" in fit.prediction.epoch.note for fit in unknown)
    assert all("no fit was profiled" in fit.prediction.epoch.note for fit in with_epoch_times(gpus, None, []).fits)

    validation = EpochRow(number=1, is_training=False, batches=3, total=200 * MS, wait=0)
    timing = replace(report.timing, gpu="Tesla T4", busy=0.9, step=50 * MS, epochs=(validation,))
    report = replace(report, timing=timing, loader=replace(report.loader, items_per_second=64 / 0.05))
    timed = with_epoch_times(gpus, report, ["t4=0.5", "RTX 2070=0.25"])
    assert isinstance(timed, GpuComparison)
    same, other = (fit.prediction.epoch for fit in timed.fits)
    assert same.least == same.most == FITS.batches * 50 * MS + 200 * MS
    assert same.least_price == pytest.approx(same.least / 3600e9 * 0.5)
    assert other.least < other.most
    text = timed.mimebundle()["text/plain"]
    assert same.words in text
    assert other.cost in text
    for given in ("A100=1", "0.5", "T4=", "T4=-1", "T4=nan"):
        with pytest.raises(NbguardError, match="price"):
            with_epoch_times(gpus, report, [given])
    alone = with_epoch_times(replace(FITS, gpu="T4"), report, ["0.5"])
    assert alone.epoch == same
    assert same.cost in alone.mimebundle()["text/plain"]
