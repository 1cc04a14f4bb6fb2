"""Fits that are the same on any device: `make("gpt adamw bf16", "cuda")` returns a Learner.

The first word is the model, the others what is different: the optimizer, the precision, callbacks, the memory format.
`random7` is the seventh of the random models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.prediction import architectures
from tests.prediction.random_models import random_model

_IMAGES = {"vit_b_16": 224}
_VOCABULARY = 5000
_WITHOUT_ACCURACY = ("gpt", "unet", "tabular", "lstm", "t5", "lora", "collab", "collabnn", "diffusion")
_LENGTH = 128


class Items:
    """A dataset that makes each item when it is asked for."""

    def __init__(self, count: int, make: Any) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Any:
        return self.make(place)


class Layer(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, width), nn.Embedding(_LENGTH, width)
        self.layers = nn.Sequential(*[Layer(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY)
        self.register_buffer("range", torch.arange(_LENGTH))

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers(self.words(x) + self.places(self.range[: x.shape[1]]))))


class Encoder(nn.Module):
    """A small vision transformer of PyTorch's own layers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Recurrent(nn.Module):
    """A language model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(500, 50), nn.LSTM(50, 60, batch_first=True), nn.Linear(60, 500)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(self.words(x))[0])


def loss_of_words(out: Any, words: Any) -> Any:
    """Return the cross entropy of the next words."""
    return functional.cross_entropy(out.flatten(0, 1), words.flatten())


def _image(size: int) -> Any:
    return lambda place: (torch.zeros(3, size, size), torch.tensor(place % 10))


def _picture(size: int, place: int) -> Any:
    from fastai.torch_core import TensorCategory, TensorImage

    return TensorImage(torch.zeros(3, size, size, dtype=torch.uint8)), TensorCategory(place % 10)


def _words(count: int, length: int = _LENGTH) -> Any:
    return lambda place: (torch.full((length,), place % count), torch.full((length,), place % count))


def _perceptron() -> nn.Module:
    head = [nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.2), *head)


def _unet() -> nn.Module:
    import torchvision
    from fastai.vision.learner import create_body
    from fastai.vision.models.unet import DynamicUnet

    body = create_body(torchvision.models.resnet18(weights=None), pretrained=False, n_in=3)
    return DynamicUnet(body, 5, (128, 128))


def _of_architecture(name: str) -> tuple[Any, int, Any, Any, int | None]:
    """Return the same as `_parts`, of other people's architectures and of fastai's other applications."""
    from fastai.collab import EmbeddingDotBias, EmbeddingNN
    from fastai.losses import CrossEntropyLossFlat, MSELossFlat

    items, loss = _ARCHITECTURES[name], CrossEntropyLossFlat()
    if items == "words":
        model = {"bert": architectures.Bert, "t5": architectures.T5, "lora": lambda: architectures.lora(Decoder())}[name]()
        words = _words(architectures.WORDS, architectures.LENGTH)
        if name == "bert":
            return model, 16, lambda place: (words(place)[0], torch.tensor(place % 10)), loss, None
        return model, 16, words, loss_of_words, None
    if items == "ratings":
        sizes = [(3000, 50), (4000, 50)]
        model = EmbeddingNN(sizes, [100]) if name == "collabnn" else EmbeddingDotBias(50, 3000, 4000, y_range=(0, 5.5))
        return model, 1024, lambda place: (torch.full((2,), place % 99), torch.zeros(1)), MSELossFlat(), None
    if items == "noise":
        return architectures.Diffusion(), 8, lambda _: (torch.zeros(3, 32, 32), torch.zeros(3, 32, 32)), MSELossFlat(), None
    if name == "frozen":
        import torchvision
        from fastai.vision.learner import create_body, create_head

        body = create_body(torchvision.models.resnet34(weights=None), pretrained=False, n_in=3)
        return nn.Sequential(body, create_head(512, 10)), 16, _image(128), loss, None
    return getattr(architectures, {"vit": "Vit"}.get(name, name))(), 16, _image(128), loss, None


_ARCHITECTURES = {
    **dict.fromkeys(("bert", "t5", "lora"), "words"),
    **dict.fromkeys(("collab", "collabnn"), "ratings"),
    "diffusion": "noise",
    **dict.fromkeys(("convnext", "vit", "efficientnet", "frozen"), "images"),
}


def _parts(name: str) -> tuple[Any, int, Any, Any, int | None]:
    """Return (model, items of a batch, what makes an item, loss, number of inputs)."""
    from fastai.losses import CrossEntropyLossFlat, MSELossFlat

    if name == "mlp":
        return _perceptron(), 256, lambda place: (torch.zeros(512), torch.tensor(place % 10)), CrossEntropyLossFlat(), None
    if name == "gpt":
        return Decoder(), 16, _words(_VOCABULARY), loss_of_words, None
    if name == "vite":
        return Encoder(), 16, _image(128), CrossEntropyLossFlat(), None
    if name == "lstm":
        return Recurrent(), 8, _words(500, 16), loss_of_words, None
    if name == "unet":
        mask = torch.zeros(128, 128, dtype=torch.long)
        return _unet(), 8, lambda _: (torch.zeros(3, 128, 128), mask.clone()), CrossEntropyLossFlat(axis=1), None
    if name == "tabular":
        from fastai.tabular.model import TabularModel

        model = TabularModel([(1000, 50), (20, 9), (7, 5)], 6, 1, [400, 200], ps=[0.1, 0.1], embed_p=0.05)
        return model, 512, lambda place: (torch.full((3,), place % 7), torch.zeros(6), torch.zeros(1)), MSELossFlat(), 2
    if name in _ARCHITECTURES:
        return _of_architecture(name)
    if name.startswith("random"):
        model, item, loss = random_model(int(name.removeprefix("random")))
        return model, 64, item, loss, None
    if name.startswith("xresnet"):
        from fastai.vision.models import xresnet

        return getattr(xresnet, name)(n_out=10), 16, _image(128), CrossEntropyLossFlat(), None
    import torchvision

    return getattr(torchvision.models, name)(num_classes=10), 16, _image(_IMAGES.get(name, 128)), CrossEntropyLossFlat(), None


def make(case: str, device: str, size: int | None = None, path: str = ".", items: tuple[int, int] | None = None) -> Any:
    """Return the Learner of a case: three and a half batches to train on, one to validate, or as many `items` for each."""
    from fastai.basics import Learner, accuracy
    from fastai.callback.all import ChannelsLast, GradientAccumulation, GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.data.transforms import IntToFloatTensor, Normalize
    from fastai.optimizer import SGD, OptimWrapper, ranger
    from fastai.vision.core import imagenet_stats
    from fasttransform import Pipeline

    torch.manual_seed(0)
    name, *words = case.split()
    model, own_size, item, loss, inputs = _parts(name)
    size = size or own_size
    trained, held_out = items or (size * 7 // 2, size)
    more: dict[str, Any] = {} if inputs is None else {"n_inp": inputs}
    if "normalize" in words:
        more["after_batch"] = Pipeline([IntToFloatTensor(), Normalize.from_stats(*imagenet_stats, cuda=False)])
        item = partial(_picture, 128)
    train = DataLoader(Items(trained, item), bs=size, num_workers=0, device=torch.device(device), **more)
    valid = DataLoader(Items(held_out, item), bs=size, num_workers=0, device=torch.device(device), **more)
    has_classes = name not in _WITHOUT_ACCURACY and not name.startswith("random")
    options: dict[str, Any] = {"metrics": accuracy} if has_classes else {}
    optimizers = {
        "sgd": partial(SGD, mom=0.9),
        "adamw": partial(OptimWrapper, opt=torch.optim.AdamW),
        "fused": partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True)),
        "ranger": ranger,
    }
    callbacks = {
        "accumulate": lambda: GradientAccumulation(2 * size),
        "clip": GradientClip,
        "channels_last": ChannelsLast,
    }
    for word in optimizers.keys() & set(words):
        options["opt_func"] = optimizers[word]
    dls = DataLoaders(train, valid, device=torch.device(device))
    learn = Learner(dls, model, loss_func=loss, path=path, **options)
    if name == "frozen":
        learn.splitter = lambda model: [list(part.parameters()) for part in model]
        learn.freeze()
    if "checkpoint" in words:
        from torch.utils.checkpoint import checkpoint

        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if "fp16" in words:
        learn.to_fp16()
    if "bf16" in words:
        learn.to_bf16()
    for word in words:
        if word in callbacks:
            learn.add_cb(callbacks[word]())
    return learn


def fit(learn: Any) -> None:
    """Fit one epoch, in silence."""
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, 1e-3)
