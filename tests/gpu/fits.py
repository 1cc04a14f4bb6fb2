"""Small real fits to record: a CNN, a transformer, a tabular MLP; by fastai where it is installed, else by a plain loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]
Kept = tuple[Any, str]
"""What must live while the snapshot is taken, and in words what ran."""

CLASSES = 10


class Transformer(nn.Module):  # type: ignore[misc] # torch is not followed
    """A two-layer encoder over tokens that predicts a class."""

    def __init__(self, width: int = 256, tokens: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class Tabular(nn.Module):  # type: ignore[misc] # torch is not followed
    """Embeddings of eight categories beside sixteen numbers, then three layers with batch normalisation."""

    def __init__(self, sizes: Sequence[int] = (7, 12, 24, 31, 60, 365, 1000, 5000), numbers: int = 16) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(size, min(50, size // 2 + 1)) for size in sizes)
        widths = [sum(embed.embedding_dim for embed in self.embeds) + numbers, 400, 200]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.BatchNorm1d(b)) for a, b in pairwise(widths)]
        self.layers = nn.Sequential(nn.BatchNorm1d(widths[0]), *layers, nn.Linear(widths[-1], CLASSES))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        categories = row[:, : len(self.embeds)].long()
        embedded = [embed(categories[:, n]) for n, embed in enumerate(self.embeds)]
        return self.layers(torch.cat([*embedded, row[:, len(self.embeds) :]], dim=1))


def cnn(*, amp: bool = False) -> Kept:
    """Train a residual network on 64 × 64 pictures."""
    if importlib.util.find_spec("torchvision"):
        from torchvision.models import resnet18  # type: ignore[import-untyped]

        model, name = resnet18(num_classes=CLASSES), "torchvision resnet18"
    else:
        widths = [3, 64, 128, 256, 512]
        convs = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)
        ]
        model, name = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)), "four conv layers"
    return _fit(name, model, [(torch.randn(3, 64, 64), _label(n)) for n in range(128)], batch=16, amp=amp)


def transformer(*, amp: bool = False) -> Kept:
    """Train a transformer on 64 tokens."""
    rows = [(torch.arange(n, n + 64) % 1000, _label(n)) for n in range(128)]
    return _fit("two-layer transformer", Transformer(), rows, batch=16, amp=amp)


def tabular(*, amp: bool = False) -> Kept:
    """Train an MLP with embeddings on rows of a table."""
    rows = [(torch.cat([torch.arange(8.0) % 7, torch.randn(16)]), _label(n)) for n in range(1280)]
    return _fit("tabular MLP with embeddings", Tabular(), rows, batch=128, amp=amp)


def _label(number: int) -> torch.Tensor:
    return torch.tensor(number % CLASSES)


def _fit(name: str, model: nn.Module, rows: Rows, *, batch: int, amp: bool) -> Kept:
    """Train for two epochs with Adam, the last quarter of the rows for validation."""
    cut = len(rows) * 3 // 4
    train = _fastai_fit if importlib.util.find_spec("fastai") else _plain_fit
    kept, loop = train(model, rows[:cut], rows[cut:], batch, amp)
    precision = "mixed precision" if amp else "fp32"
    return kept, f"{name}, batch {batch}, {precision}, two epochs by {loop}"


def _fastai_fit(model: nn.Module, rows: Rows, valid: Rows, batch: int, amp: bool) -> Kept:
    import fastai
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner
    from fastai.callback.fp16 import MixedPrecision
    from fastai.callback.progress import ProgressCallback  # noqa: F401 - gives Learner its no_bar

    device = torch.device("cuda")
    loaders = DataLoaders.from_dsets(rows, valid, bs=batch, num_workers=0, device=device)
    learn = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), cbs=[MixedPrecision()] if amp else [])
    with learn.no_logging(), learn.no_bar():
        learn.fit(2)
    return learn, f"fastai {fastai.__version__} Learner"


def _plain_fit(model: nn.Module, rows: Rows, valid: Rows, batch: int, amp: bool) -> Kept:
    model.to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    for _ in range(2):
        model.train()
        for x, y in torch.utils.data.DataLoader(list(rows), batch_size=batch, drop_last=True):
            with torch.autocast("cuda", enabled=amp):
                loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", enabled=amp):
            for x, _y in torch.utils.data.DataLoader(list(valid), batch_size=batch):
                model(x.cuda())
    return (model, optimizer, scaler), "a plain PyTorch loop"
