"""Random models, each by its number: perceptrons, pictures, words, tables, of layers, widths and losses that are drawn.

They have few operators, so that a fit takes a moment, and large tensors, which cost nothing where nothing is computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Parts = tuple[nn.Module, Callable[[int], Any], Any]
"""(model, what makes an item, loss)"""

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish, nn.ELU)


def random_model(seed: int) -> Parts:
    """Return the model of a number, with its data and its loss."""
    draw = random.Random(seed)
    return draw.choice((_perceptron, _pictures, _picture_to_picture, _words, _classified_words, _table))(draw)


class Sum(nn.Module):
    """A residual block."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


def _loss_of_numbers(draw: random.Random) -> Any:
    return draw.choice((functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss))


def _classes(draw: random.Random) -> tuple[int, Any]:
    from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat

    classes = draw.choice((2, 10, 1000, 30_000))
    losses = [CrossEntropyLossFlat(), LabelSmoothingCrossEntropyFlat()]
    return (1, BCEWithLogitsLossFlat()) if draw.random() < 0.2 else (classes, draw.choice(losses))


def _target(classes: int) -> Callable[[int], torch.Tensor]:
    return (lambda place: torch.tensor(place % classes)) if classes > 1 else (lambda place: torch.tensor(float(place % 2)))


def _perceptron(draw: random.Random) -> Parts:
    inputs, (classes, loss) = draw.choice((64, 500, 4096)), _classes(draw)
    width, layers = inputs, list[nn.Module]()
    for _ in range(draw.randint(1, 4)):
        wide = draw.choice((128, 333, 1024, 3000))
        layers += [nn.Linear(width, wide, bias=draw.random() < 0.8), draw.choice(_ACTIVATIONS)()]
        layers += draw.sample([nn.LayerNorm(wide), nn.BatchNorm1d(wide), nn.Dropout(0.2)], draw.randint(0, 2))
        width = wide
        if draw.random() < 0.3:
            layers.append(Sum(nn.Linear(width, width), draw.choice(_ACTIVATIONS)()))
    target = _target(classes)
    return nn.Sequential(*layers, nn.Linear(width, classes)), lambda place: (torch.zeros(inputs), target(place)), loss


def _convolutions(draw: random.Random, width: int, *, keeps_size: bool) -> tuple[list[nn.Module], int]:
    layers = list[nn.Module]()
    for _ in range(draw.randint(1, 4)):
        wide, kernel = draw.choice((16, 48, 64, 100)), draw.choice((1, 3, 5))
        stride = 1 if keeps_size else draw.choice((1, 2))
        layers.append(nn.Conv2d(width, wide, kernel, stride, kernel // 2, bias=draw.random() < 0.5))
        layers += draw.sample([nn.BatchNorm2d(wide), nn.GroupNorm(2, wide), nn.Dropout2d(0.1)], draw.randint(0, 2))
        layers.append(draw.choice(_ACTIVATIONS)())
        if draw.random() < 0.4:
            layers.append(Sum(nn.Conv2d(wide, wide, 3, padding=1, groups=draw.choice((1, wide))), nn.BatchNorm2d(wide)))
        if not keeps_size and draw.random() < 0.3:
            layers.append(draw.choice((nn.MaxPool2d, nn.AvgPool2d))(2, ceil_mode=True))
        width = wide
    return layers, width


def _pictures(draw: random.Random) -> Parts:
    size, (classes, loss) = draw.choice((33, 64, 96)), _classes(draw)
    layers, width = _convolutions(draw, 3, keeps_size=False)
    head = draw.choice(([nn.AdaptiveAvgPool2d(1)], [nn.AdaptiveMaxPool2d(1)]))
    target = _target(classes)
    return (
        nn.Sequential(*layers, *head, nn.Flatten(), nn.Linear(width, classes)),
        lambda place: (torch.zeros(3, size, size), target(place)),
        loss,
    )


def _picture_to_picture(draw: random.Random) -> Parts:
    size, loss = draw.choice((32, 65)), _loss_of_numbers(draw)
    layers, width = _convolutions(draw, 3, keeps_size=True)
    if draw.random() < 0.5:
        layers += [nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.Upsample(size=size, mode="nearest")]
    layers.append(nn.Conv2d(width, 3, 1))
    return nn.Sequential(*layers), lambda _: (torch.zeros(3, size, size), torch.zeros(3, size, size)), loss


class Attended(nn.Module):
    """A layer of a transformer, with or without a mask."""

    def __init__(self, width: int, heads: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.heads, self.kind, self.dropout = heads, kind, dropout
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            each.reshape(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.kind == "mask" else None
        if self.kind == "products":
            weights = functional.dropout((q @ k.transpose(-1, -2) * 0.1).softmax(-1), self.dropout, self.training)
            out = weights @ v
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.kind == "causal")
        x = x + self.out(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.last(x))


class Transformer(nn.Module):
    """Words, layers, and a head for each word or for all of them."""

    def __init__(self, draw: random.Random, length: int, words: int, classes: int) -> None:
        super().__init__()
        heads = draw.choice((2, 4, 8))
        width = heads * draw.choice((16, 32, 64))
        self.is_classifier = classes > 0
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(1, length, width))
        kind, dropout = draw.choice(("plain", "causal", "mask", "products")), draw.choice((0.0, 0.1))
        self.layers = nn.Sequential(*(Attended(width, heads, dropout, kind) for _ in range(draw.randint(1, 3))))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes or words)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.layers(self.words(x) + self.places))
        return self.head(x.mean(1) if self.is_classifier else x)


def _words(draw: random.Random) -> Parts:
    from fastai.losses import CrossEntropyLossFlat

    length, words = draw.choice((33, 64, 128)), draw.choice((500, 3000, 10_000))
    row = torch.arange(length) % words
    return Transformer(draw, length, words, 0), lambda _: (row, row), CrossEntropyLossFlat()


def _classified_words(draw: random.Random) -> Parts:
    length, words, (classes, loss) = draw.choice((64, 200)), draw.choice((500, 10_000)), _classes(draw)
    row, target = torch.arange(length) % words, _target(classes)
    return Transformer(draw, length, words, classes), lambda place: (row, target(place)), loss


class Table(nn.Module):
    """Embeddings of a row's categories, beside its numbers."""

    def __init__(self, draw: random.Random, sizes: list[int], classes: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, draw.choice((8, 50, 128))) for size in sizes)
        width = sum(each.embedding_dim for each in self.embeddings)  # type: ignore[misc] # each is an Embedding
        wide = draw.choice((100, 1000))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.BatchNorm1d(wide), nn.Linear(wide, classes))

    def forward(self, x: Any) -> Any:
        return self.head(self.dropout(torch.cat([layer(x[:, at]) for at, layer in enumerate(self.embeddings)], 1)))


def _table(draw: random.Random) -> Parts:
    sizes, (classes, loss) = [draw.choice((3, 50, 20_000)) for _ in range(draw.randint(1, 5))], _classes(draw)
    target = _target(classes)
    return Table(draw, sizes, classes), lambda place: (torch.full((len(sizes),), place % 3), target(place)), loss
