"""What would save memory: the lines that are shown are run, and the fit after them takes what was said."""

from __future__ import annotations

from functools import cache

import pytest

from nbguard.prediction.predict import predict
from nbguard.prediction.prediction import Prediction
from tests.prediction.fits import make
from tests.thorough import spread

MIB = 2**20


@cache
def _foreseen(case: str) -> Prediction:
    return predict(make(case, "cpu", 8), savings=True)


@pytest.mark.parametrize("case", spread(["bert", "efficientnet", "gpt", "mlp bf16 sgd", "resnet18 channels_last"], 3))
def test_the_lines_do_what_was_said(case: str) -> None:
    before = _foreseen(case)
    assert before.savings
    for saving in before.savings:
        assert saving.saved == before.peak_reserved - saving.peak_reserved
        learn = make(case, "cpu", 8)
        exec(saving.code, {"learn": learn})
        after = predict(learn, batch_size=saving.batch_size, settings=saving.settings)
        assert (after.peak_allocated, after.peak_reserved) == (saving.peak_allocated, saving.peak_reserved), saving.name


def test_what_is_done_already_is_not_proposed() -> None:
    names = [saving.name for saving in predict(make("mlp bf16 sgd accumulate", "cpu", 8), savings=True).savings]
    assert names == ["expandable segments"]


def test_a_gpu_that_is_slow_in_bfloat16_is_offered_float16_only() -> None:
    names = {saving.name for saving in predict(make("mlp", "cpu", 8), gpu="T4", savings=True).savings}
    assert "float16" in names
    assert "bfloat16" not in names


def test_the_report_shows_what_helps_with_its_lines_and_names_the_rest() -> None:
    prediction = _foreseen("bert")
    text = prediction._repr_mimebundle_()["text/plain"]
    helping = [saving for saving in prediction.savings if saving.saved > 0.01 * prediction.peak_reserved]

    assert [saving.saved for saving in prediction.savings] == sorted((each.saved for each in prediction.savings), reverse=True)
    assert {"bfloat16", "checkpoints of 4 BertLayer"} <= {saving.name for saving in helping}
    for saving in helping:
        for line in saving.code.splitlines():
            assert line in text
