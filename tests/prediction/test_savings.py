"""What would save memory: the lines that are shown are run, and the fit after them takes what was said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.predict import predict, tracer_of
from nbguard.training.prediction.prediction import Prediction
from nbguard.training.prediction.savings import largest_batch, loss_in_parts, of_model, savings
from tests.prediction.fits import make
from tests.thorough import spread

MIB = 2**20


@cache
def _predicted(case: str) -> Prediction:
    return predict(make(case, "cpu", 8), savings=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(["gpt", "efficientnet", "bert", "mlp bf16 sgd", "resnet18 channels_last"], 3))
def test_the_lines_do_what_was_said(case: str) -> None:
    before = _predicted(case)
    assert before.savings
    for saving in before.savings:
        assert saving.saved == before.peak_reserved - saving.peak_reserved
        learn = make(case, "cpu", 8)
        exec(saving.code, {"learn": learn})
        after = predict(learn, batch_size=saving.batch_size, settings=saving.settings)
        assert (after.peak_allocated, after.peak_reserved) == (saving.peak_allocated, saving.peak_reserved), saving.name


def test_what_is_done_already_is_not_proposed() -> None:
    names = {saving.name for saving in predict(make("mlp bf16 sgd accumulate", "cpu", 8), savings=True).savings}
    always = {"gradients freed after the step", "no bias before a batch norm", "the loss in 8 parts"}
    assert names == {"expandable segments", *always}


@pytest.mark.slow
def test_a_gpu_that_is_slow_in_bfloat16_is_offered_float16_only() -> None:
    names = {saving.name for saving in predict(make("mlp", "cpu", 8), gpu="T4", savings=True).savings}
    assert "float16" in names
    assert "bfloat16" not in names


def test_the_report_shows_what_helps_with_its_lines_and_names_the_rest() -> None:
    prediction = _predicted("gpt")
    text = prediction._repr_mimebundle_()["text/plain"]
    helping = [saving for saving in prediction.savings if saving.saved > 0.01 * prediction.peak_reserved]

    assert [saving.saved for saving in prediction.savings] == sorted((each.saved for each in prediction.savings), reverse=True)
    assert {"bfloat16", "checkpoints of 4 Layer"} <= {saving.name for saving in helping}
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


@pytest.mark.slow
def test_the_lines_for_a_step_do_what_was_said() -> None:
    """Run where the user would run them: in the namespace of the step."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_STEP, names)
    batch = torch.zeros(64, 512), torch.zeros(64, dtype=torch.long)
    before = predict(names["step"], batch, savings=True)

    saved = {saving.name: saving.saved for saving in before.savings}
    assert saved.keys() == {
        "SGD with momentum",
        "a fused Adam",
        "bfloat16",
        "checkpoints of 4 Block",
        "expandable segments",
        "gradients of 2 batches of 32 added up",
        "gradients of 4 batches of 16 added up",
    }
    assert saved["a fused Adam"] > 0.1 * before.peak_reserved
    for saving in before.savings:
        own: dict[str, Any] = {"__name__": "__main__"}
        exec(_STEP, own)
        exec(saving.code, own)
        after = predict(own["step"], batch, batch_size=saving.batch_size, settings=saving.settings)
        assert (after.peak_allocated, after.peak_reserved) == (saving.peak_allocated, saving.peak_reserved), saving.name


_PICTURES = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 2000))
loss_function = nn.CrossEntropyLoss()
sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

def step(x, y):
    sgd.zero_grad(set_to_none=False)
    loss = loss_function(net(x), y)
    loss.backward()
    sgd.step()
"""


@pytest.mark.slow
def test_a_bias_that_a_norm_takes_away_and_gradients_that_stay_are_seen() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_PICTURES, names)
    batch = torch.zeros(64, 3, 16, 16), torch.zeros(64, dtype=torch.long)
    before = predict(names["step"], batch, savings=True)

    saved = {saving.name: saving for saving in before.savings}
    kinds = {"no bias before a batch norm", "gradients freed after the step", "the loss in 8 parts", "channels last"}
    assert kinds <= saved.keys()
    assert saved["gradients freed after the step"].saved > 0
    for name in sorted(kinds):
        own: dict[str, Any] = {"__name__": "__main__"}
        exec(_PICTURES, own)
        exec(saved[name].code, own)
        after = predict(own["step"], batch)
        assert (after.peak_allocated, after.peak_reserved) == (saved[name].peak_allocated, saved[name].peak_reserved), name


def test_the_network_without_the_bias_computes_the_same() -> None:
    """In training, where the norm takes the batch's mean away, and after it, by the norm's running mean."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_PICTURES, names)
    net, x = names["net"], torch.randn(8, 3, 16, 16)
    net(x)
    code = next(each for each in of_model("net", net) if each.name.startswith("no bias")).code
    before = net(x), net.eval()(x)
    exec(code, names)
    after = net.eval()(x), net.train()(x)

    assert net[0].bias is None
    assert torch.allclose(before[1], after[0], atol=1e-5)
    assert torch.allclose(before[0], after[1], atol=1e-5)


def test_a_loss_in_parts_is_the_whole_loss() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    out, target = torch.randn(37, 11, requires_grad=True), torch.arange(37) % 11
    whole = loss(out, target)
    [whole_gradient] = torch.autograd.grad(whole, out)
    [change] = loss_in_parts("loss", loss)
    exec(change.code, {"loss": loss})
    parts = loss(out, target)
    [gradient] = torch.autograd.grad(parts, out)

    assert torch.allclose(parts, whole)
    assert torch.allclose(gradient, whole_gradient, atol=1e-7)
    assert list(loss_in_parts("loss", nn.CrossEntropyLoss(weight=torch.ones(11)))) == []


def test_the_largest_batch_after_a_change_is_searched_for_where_both_are_asked() -> None:
    tracer = tracer_of(LearnerSource.of(make("mlp", "cpu", 8, items=(400, 8)), None), "650MiB")
    endless = tracer.endless(None)
    [sgd] = savings(tracer, None, endless, (2, 13), is_wanted=lambda change: change.name.startswith("SGD"), largest=True)
    before = largest_batch(tracer, endless)

    assert sgd.largest is not None
    assert (sgd.largest.limit, sgd.largest.is_whole_set) > (before.limit, before.is_whole_set)
    shown = replace(_predicted("mlp bf16 sgd"), savings=(replace(sgd, saved=2**40),))
    assert "largest batch: " in shown._repr_mimebundle_()["text/plain"]


def test_a_gpu_too_small_for_a_batch_that_batch_norm_takes_has_no_largest_batch() -> None:
    found = predict(make("mlp", "cpu", 8, items=(4000, 8)), gpu="610MiB", largest=True)
    assert found.largest is not None
    assert found.largest.limit == 0
    assert "not even one item fits" in found._repr_mimebundle_()["text/plain"]


def test_an_optimizer_with_kernels_of_its_own_is_refused_by_name() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_PICTURES, names)
    names["sgd"].__class__ = type("SGD8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.sgd"})
    with pytest.raises(UnpredictableError, match="sgd is bitsandbytes's SGD8bit"):
        predict(names["step"], (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)))
