"""`%%profile_fit --predict`: the fits of a cell are predicted, and nothing of it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.magics.profile_fit import as_line
from nbguard.frontend.notebook.predictions import prediction_of, prediction_on
from nbguard.training.prediction.predict import predict, predict_cell
from nbguard.training.prediction.prediction import GpuComparison
from tests.prediction.fits import make

LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
total = 0.0
for epoch in range(2):
    model.train()
    for i, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if i % 10 == 0:
            print(total)
"""


def _names() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = torch.utils.data.TensorDataset(torch.zeros(100, 64), torch.zeros(100, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, 16, shuffle=True)
    return {"__name__": "__main__", "torch": torch, "nn": nn, "model": model, "loader": loader, "learn": make("mlp", "cpu", 8)}


def _bits(model: nn.Module) -> list[Any]:
    return [(id(each), each.data_ptr(), each.grad, each.detach().numpy().tobytes()) for each in model.parameters()]


def test_a_loop_is_predicted_on_copies_and_binds_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = _names()
    before, bits, numbers = dict(names), _bits(names["model"]), torch.get_rng_state()

    found = predict_cell(LOOP, names, ("T4",))

    assert {name: id(value) for name, value in names.items()} == {name: id(value) for name, value in before.items()}
    assert _bits(names["model"]) == bits
    assert torch.equal(torch.get_rng_state(), numbers)
    assert capsys.readouterr().out == ""
    [fit] = found.fits
    assert fit.text.startswith("line 6: for (i, (xb, yb)) in enumerate(loader)")
    assert fit.prediction.fits is True
    assert fit.prediction.batch_sizes == (16, 16, 16)
    assert {str(each.category) for each in fit.prediction.categories} >= {"parameters", "gradients", "optimizer state"}


@pytest.mark.slow
def test_several_gpus_give_one_table_in_the_order_in_which_they_are_named() -> None:
    names = _names()
    gpus = ["A100", "RTX 2070", "610MiB"]
    alone = [prediction_of(names, "learn", 64, gpu, None, largest=True) for gpu in gpus]
    found = prediction_on(names, "learn", 64, ["A100", *gpus], None, largest=True)

    assert isinstance(found, GpuComparison)
    assert [replace(fit.prediction, seconds=0, import_seconds=0) for fit in found.fits] == [
        replace(each, seconds=0, import_seconds=0) for each in alone
    ]
    text = found.mimebundle()["text/plain"]
    rows = [next(line for line in text.splitlines() if each.gpu in line) for each in alone]
    for prediction, row in zip(alone, rows, strict=True):
        assert ("does not fit" in row) is (prediction.fits is False)
        assert ("−" in row) is ((prediction.capacity or 0) < prediction.need)
    assert [prediction.fits for prediction in alone] == [True, True, False]
    with pytest.raises(NbguardError, match="one GPU"):
        prediction_on(names, "learn", None, gpus, None, savings=True)


def test_fits_of_a_learner_are_predicted_in_turn_with_what_the_cell_changes() -> None:
    names = _names()
    learn = names["learn"]
    state = [id(each) for each in learn.cbs], _bits(learn.model)

    found = predict_cell("learn.to_bf16()\nlearn.fit(1)\nlearn.to_fp32().fine_tune(2)\n", names)

    assert ([id(each) for each in learn.cbs], _bits(learn.model)) == state
    assert learn.opt is None
    assert [fit.text for fit in found.fits] == [
        "line 2: learn.fit(1)",
        "line 3: learn.to_fp32().fine_tune(2), after freeze()",
        "line 3: learn.to_fp32().fine_tune(2), after unfreeze()",
    ]
    same = make("mlp bf16", "cpu", 8)
    assert found.fits[0].prediction.peak_allocated == predict(same).peak_allocated
    text = found._repr_mimebundle_()["text/plain"]
    assert "no line of the cell was run" in text
    assert text.count("assumed: gradients are finite") == 1


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("learn = make()\nlearn.fit(1)", "the cell makes learn itself"),
        ("other.fit(1)", "the cell makes other itself"),
        ("x = 1", "starts no fit"),
        ("for i in range(3):\n    model(x).backward()", "iterates over no existing loader"),
        ("for", "is not valid Python"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_line(source: str, match: str) -> None:
    with pytest.raises(NbguardError, match=match) as caught:
        predict_cell(source, _names())
    assert "\n" not in str(caught.value)


def test_a_cell_that_is_predicted_stays_text() -> None:
    cell = ["%%profile_fit --predict --gpu T4\n", "learn.fit(1)\n"]
    assert as_line(cell) == cell
    assert as_line(["%%profile_fit\n", "learn.fit(1)\n"])[0] == "%profile_fit\n"
