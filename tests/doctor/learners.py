"""Small fastai Learners, and plain models, that repeat: what a diagnosis must leave as it is and find nothing wrong with."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Made = tuple[Any, Any, Any]
"""(Learner or model, batch or None, loss or None)"""


class _Items:
    """A dataset of items that are made when asked for."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Any:
        return self._make(place)


def _learner(model: nn.Module, make: Callable[[int], Any], loss: Any, **options: Any) -> Any:
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner

    inputs = options.pop("n_inp", None)
    more = {} if inputs is None else {"n_inp": inputs}
    train, valid = (DataLoader(_Items(8, make), bs=4, num_workers=0, shuffle=shuffles, **more) for shuffles in (True, False))
    return Learner(DataLoaders(train, valid, device="cpu"), model, loss_func=loss, path=Path(), **options)


def _image(size: int) -> Callable[[int], Any]:
    def make(place: int) -> Any:
        generator = torch.Generator().manual_seed(place)
        return torch.randn(3, size, size, generator=generator), torch.tensor(place % 3)

    return make


def _resnet(**_: Any) -> Any:
    """Return a ResNet with one block in each stage: all that a larger one has, in a fraction of the time."""
    import torchvision

    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])


def vision() -> Made:
    from fastai.losses import CrossEntropyLossFlat
    from fastai.vision.learner import create_vision_model

    model = create_vision_model(_resnet, 3, pretrained=False, cut=6)  # two stages
    return _learner(model, _image(32), CrossEntropyLossFlat()), None, None


def unet() -> Made:
    from fastai.layers import ConvLayer
    from fastai.losses import CrossEntropyLossFlat
    from fastai.vision.models.unet import DynamicUnet

    def make(place: int) -> Any:
        return _image(32)(place)[0], torch.full((32, 32), place % 3)

    body = nn.Sequential(*(ConvLayer(a, b, stride=2) for a, b in ((3, 8), (8, 16), (16, 32))))
    model = DynamicUnet(body, 3, (32, 32))
    return _learner(model, make, CrossEntropyLossFlat(axis=1)), None, None


def awd_lstm() -> Made:
    from fastai.callback.rnn import ModelResetter, RNNRegularizer
    from fastai.losses import CrossEntropyLossFlat
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config
    from fastai.text.models.core import get_text_classifier

    def make(place: int) -> Any:
        generator = torch.Generator().manual_seed(place)
        return torch.randint(2, 60, (24,), generator=generator), torch.tensor(place % 3)

    config = {**awd_lstm_clas_config, "n_hid": 40, "emb_sz": 20, "n_layers": 2}
    model = get_text_classifier(AWD_LSTM, 60, 3, seq_len=12, config=config, max_len=100)

    def first(outputs: Any, *targets: Any) -> Any:
        return CrossEntropyLossFlat()(outputs[0] if isinstance(outputs, tuple) else outputs, *targets)

    return _learner(model, make, first, cbs=[ModelResetter(), RNNRegularizer(alpha=2.0, beta=1.0)]), None, None


def tabular() -> Made:
    from fastai.losses import MSELossFlat
    from fastai.tabular.model import TabularModel

    def make(place: int) -> Any:
        generator = torch.Generator().manual_seed(place)
        return (
            torch.randint(0, 5, (2,), generator=generator),
            torch.randn(3, generator=generator),
            torch.randn(1, generator=generator),
        )

    model = TabularModel([(5, 3), (5, 3)], 3, 1, [20, 10], ps=[0.1, 0.1], embed_p=0.05)
    return _learner(model, make, MSELossFlat(), n_inp=2), None, None


def xresnet() -> Made:
    from fastai.layers import ResBlock
    from fastai.losses import CrossEntropyLossFlat
    from fastai.vision.models.xresnet import XResNet

    return _learner(XResNet(ResBlock, 1, [1, 1, 1, 1], n_out=3), _image(32), CrossEntropyLossFlat()), None, None


def plain() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    return model, (torch.randn(16, 8), torch.randn(16, 2)), nn.MSELoss()


def transformer() -> Made:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20))
    return model, torch.randint(0, 20, (4, 7)), None


def lstm() -> Made:
    return nn.LSTM(8, 12, 2, batch_first=True, dropout=0.2), torch.randn(4, 5, 8), None


class Tied(nn.Module):
    """A language model whose decoder has the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 12), nn.Linear(12, 30)
        self.head.weight = self.words.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.words(x))


def tied() -> Made:
    return Tied(), torch.randint(0, 30, (4, 6)), None


class Named(nn.Module):
    """A model that is called by keywords and returns its loss, as Transformers' are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3)

    def forward(self, inputs: Any = None, labels: Any = None) -> Any:
        logits = self.body(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def named() -> Made:
    return Named(), {"inputs": torch.randn(6, 8), "labels": torch.randint(0, 3, (6,))}, None


class Hooked(nn.Module):
    """A model with hooks of the user's: one fills a list, one replaces an output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.stored: list[Any] = []
        self.body.register_forward_hook(lambda _module, _args, out: self.stored.append(out.detach()))
        self.head.register_forward_hook(lambda _module, _args, out: out * 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).relu())


def hooked() -> Made:
    return Hooked(), torch.randn(6, 8), None


CLEAN: dict[str, Callable[[], Made]] = {
    "vision": vision,
    "U-Net": unet,
    "AWD-LSTM": awd_lstm,
    "tabular": tabular,
    "xresnet": xresnet,
    "plain": plain,
    "transformer": transformer,
    "LSTM": lstm,
    "tied": tied,
    "by keywords": named,
    "hooks": hooked,
}


def make(name: str) -> Made:
    """Return a clean subject; the seed is always the same."""
    torch.manual_seed(0)
    random.seed(0)  # fastai's loaders draw the seed of their order from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CLEAN[name]()
