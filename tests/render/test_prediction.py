"""What is said of a prediction: golden text, and the same in HTML."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from nbguard.prediction.prediction import Prediction
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
    workspaces=16 * MIB,
    band=381 * MIB,
    fits=True,
    why="7.44 GiB is reserved at most, of 14.41 GiB beside CUDA's context",
    batch_sizes=(64, 64, 64, 17),
    batches=94,
    convolutions=318,
    seconds=1.84,
    assumptions=("the device is empty before it",),
)
_NOT_KNOWN = replace(
    FITS,
    settings="expandable_segments:True",
    fits=None,
    why="7.44 GiB would be reserved, and not all could be traced: the callback Hoarder is not traced",
    unknown=("the callback Hoarder is not traced",),
)
_UNNAMED = replace(FITS, gpu="a GPU of any size", capacity=None, fits=None, why="no GPU was named")


def test_golden_prediction(request: pytest.FixtureRequest) -> None:
    shown = (FITS, replace(FITS, fits=False, why="the fit runs out of memory"), _NOT_KNOWN, _UNNAMED)
    _golden("prediction.txt", "\n\n".join(each.mimebundle()["text/plain"] for each in shown), request)


def test_the_html_says_what_the_text_says() -> None:
    html = _NOT_KNOWN.mimebundle()["text/html"]

    for text in (_NOT_KNOWN.why, "not counted: the callback Hoarder is not traced", "peak reserved", "7.44 GiB"):
        assert escape(text) in html


def test_the_need_adds_up() -> None:
    assert FITS.need == (7_616 + 600 + 381) * MIB
