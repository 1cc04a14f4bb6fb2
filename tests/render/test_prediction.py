"""What is said of a prediction: golden text, and the same in HTML."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from nbguard.training.prediction.prediction import (
    CategoryBytes,
    CellPrediction,
    FitPhase,
    FitPhasePeak,
    GpuComparison,
    MemoryCategory,
    PeakPlace,
    PredictedFit,
    Prediction,
)
from tests.render.test_render import _golden

MIB = 2**20
FITS = Prediction(
    gpu="T4",
    capacity=15_360 * MIB,
    context=600 * MIB,
    settings="",
    torch_version="2.13.0",
    peak_allocated=7_480 * MIB,
    peak_reserved=7_616 * MIB,
    end_allocated=1_310 * MIB,
    model=98 * MIB,
    is_live=False,
    held=0,
    workspaces=16 * MIB,
    phases=(
        FitPhasePeak(FitPhase.FORWARD, 6_800 * MIB),
        FitPhasePeak(FitPhase.BACKWARD, 7_480 * MIB),
        FitPhasePeak(FitPhase.STEP, 2_100 * MIB),
    ),
    categories=(
        CategoryBytes(MemoryCategory.ACTIVATIONS, 7_072 * MIB),
        CategoryBytes(MemoryCategory.OPTIMIZER_STATE, 196 * MIB),
        CategoryBytes(MemoryCategory.PARAMETERS, 98 * MIB),
        CategoryBytes(MemoryCategory.GRADIENTS, 98 * MIB),
        CategoryBytes(MemoryCategory.WORKSPACES, 16 * MIB),
    ),
    peak=PeakPlace(
        phase=FitPhase.BACKWARD,
        batch=2,
        operator="aten.convolution_backward.default",
        module="0.4.1.conv2",
        module_class="Conv2d",
        line="",
    ),
    first_batch=7_284 * MIB,
    steady=7_480 * MIB,
    band=381 * MIB,
    fits=True,
    why="at most 7.44 GiB is reserved of the 14.4 GiB apart from CUDA's context",
    batch_sizes=(64, 64, 64, 17),
    batches=94,
    convolutions=318,
    seconds=1.84,
    assumptions=("the device is empty before the fit",),
)
_NOT_KNOWN = replace(
    FITS,
    settings="expandable_segments:True",
    fits=None,
    why="7.44 GiB would be reserved of the 14.4 GiB apart from CUDA's context; the callback Hoarder is not traced",
    unknown=("the callback Hoarder is not traced",),
)
CELL = CellPrediction(
    executed="no line of the cell was run",
    fits=(
        PredictedFit(text="line 2: learn.fine_tune(3), after freeze()", prediction=FITS),
        PredictedFit(text="line 2: learn.fine_tune(3), after unfreeze()", prediction=FITS),
    ),
)
GPUS = GpuComparison(
    executed="",
    fits=(
        PredictedFit(text="", prediction=FITS),
        PredictedFit(text="", prediction=replace(FITS, gpu="an RTX2070", capacity=8 * 1024 * MIB, fits=False)),
    ),
)
_UNNAMED = replace(FITS, gpu="a GPU of any size", capacity=None, fits=None, why="no GPU was named")


def test_golden_prediction(request: pytest.FixtureRequest) -> None:
    shown = (FITS, replace(FITS, fits=False, why="the fit runs out of memory"), _NOT_KNOWN, _UNNAMED, CELL, GPUS)
    _golden("prediction.txt", "\n\n".join(each.mimebundle()["text/plain"] for each in shown), request)


def test_the_html_says_what_the_text_says() -> None:
    html = _NOT_KNOWN.mimebundle()["text/html"]

    for text in (_NOT_KNOWN.why, "not counted: the callback Hoarder is not traced", "peak reserved", "7.44 GiB"):
        assert escape(text) in html


def test_the_need_adds_up() -> None:
    assert FITS.need == (7_616 + 600 + 381) * MIB


def test_what_the_peak_is_made_of_adds_up() -> None:
    assert sum(each.nbytes for each in FITS.categories) == FITS.peak_allocated
