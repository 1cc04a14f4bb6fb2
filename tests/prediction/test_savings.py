"""What would save memory: the lines that are shown are run, and the fit after them takes what was said."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

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


_STEP = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 4096), nn.Linear(4096, 512)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))

net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(512, 10))
adam = torch.optim.Adam(net.parameters())

def step(x, y):
    adam.zero_grad()
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    adam.step()
    return loss
"""


def test_the_lines_for_a_step_do_what_was_said() -> None:
    """Run where the user would run them: in the namespace of the step."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_STEP, names)
    batch = torch.zeros(64, 512), torch.zeros(64, dtype=torch.long)
    before = predict(names["step"], batch, savings=True)

    saved = {saving.name: saving.saved for saving in before.savings}
    assert saved.keys() == {
        "checkpoints of 4 Block",
        "a step of one parameter after the other",
        "expandable segments",
    }
    assert saved["a step of one parameter after the other"] > 0.1 * before.peak_reserved
    for saving in before.savings:
        own: dict[str, Any] = {"__name__": "__main__"}
        exec(_STEP, own)
        exec(saving.code, own)
        after = predict(own["step"], batch, settings=saving.settings)
        assert (after.peak_allocated, after.peak_reserved) == (saving.peak_allocated, saving.peak_reserved), saving.name
