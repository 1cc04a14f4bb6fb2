"""What is wrong with a Learner is said in one line, in its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.predict import predict
from tests.prediction.fits import Items, make


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(512, 10)

    def forward(self, _: Any) -> Any:
        raise KeyError("width")


def _empty(learn: Any) -> None:
    learn.dls.train.dataset, learn.dls.train.n = Items(0, None), 0


_FAILS = "would fail with batches of 8 items:"

CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda learn: setattr(learn, "dls", [1, 2]), "learn.dls is a list, not DataLoaders: set learn.dls = "),
    "no loaders": (lambda learn: setattr(learn, "dls", None), "learn.dls is None, not DataLoaders"),
    "one loader": (lambda learn: setattr(learn, "dls", learn.dls.train), "learn.dls is a DataLoader, not DataLoaders"),
    "empty loaders": (lambda learn: setattr(learn.dls, "loaders", []), "learn.dls has no loaders"),
    "no data": (_empty, "the loader is empty"),
    "no loss": (lambda learn: setattr(learn, "loss_func", None), "learn.loss_func is None, not a function"),
    "no optimizer": (lambda learn: setattr(learn, "opt_func", 3), "learn.opt_func is an int, not a function"),
    "no model": (lambda learn: setattr(learn, "model", print), "learn.model is a builtin_function_or_method, not a torch"),
    "another width": (
        lambda learn: setattr(learn, "model", nn.Linear(3, 3)),
        f"{_FAILS} RuntimeError: ",
    ),
    "a failing model": (
        lambda learn: setattr(learn, "model", Broken()),
        f"{_FAILS} KeyError: 'width', at forward()",
    ),
    "another loss": (
        lambda learn: setattr(learn, "loss_func", nn.MSELoss()),
        f"{_FAILS} RuntimeError: ",
    ),
    "a metric": (lambda learn: setattr(learn, "metrics", [3]), "'int' object is not callable"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_one_line(case: str) -> None:
    change, words = CASES[case]
    learn = make("mlp", "cpu", 8)
    change(learn)
    with pytest.raises(UnpredictableError) as caught:
        predict(learn, gpu="16GiB")

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"largest": True}, {"savings": True}])
@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_batch_that_no_loader_yields_is_one_line(options: dict[str, Any], is_torchs: bool) -> None:
    learn = make("mlp", "cpu", 8, items=(64, 8))
    learn.dls.train.drop_last = True
    if is_torchs:
        data = torch.utils.data.TensorDataset(torch.zeros(64, 512), torch.zeros(64, dtype=torch.long))
        learn.dls.loaders[0] = torch.utils.data.DataLoader(data, 8, drop_last=True)
    with pytest.raises(UnpredictableError, match="the training set has 64 items, fewer than the 512"):
        predict(learn, batch_size=512, gpu="T4", **options)

    assert predict(learn, batch_size=64, gpu="T4", **options).fits is True


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", [{}, {"num_layers": 2, "dropout": 0.1}, {"bidirectional": True}])
@pytest.mark.filterwarnings("ignore")
def test_recurrent_layers_have_a_band(kind: Any, more: dict[str, Any]) -> None:
    """A larger one than layers of the same weights without steps, and it is said to be assumed."""
    model, head = kind(32, 64, batch_first=True, **more), nn.Linear(128 if "bidirectional" in more else 64, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])

    def step(batch: Any) -> None:
        head(model(batch)[0][:, -1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    short, long = (predict(step, torch.zeros(16, length, 32), gpu="16GiB") for length in (10, 1000))
    assert (short.fits, long.fits) == (True, True)
    assert long.band > short.band > 0.05 * short.peak_reserved
    assert "measured on an H200" in long.assumptions[-1]


@pytest.mark.slow
def test_of_a_frozen_model_both_stages_are_a_cells_to_predict() -> None:
    learn = make("frozen", "cpu", 4)
    (found,) = [text for text in predict(learn).assumptions if "frozen" in text]
    assert "`%%profile_fit --predict`" in found
    learn.unfreeze()
    assert not any("frozen" in text for text in predict(learn).assumptions)
