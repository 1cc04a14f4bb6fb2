"""How long a prediction takes, beside one real training step of the same model on one CPU thread.

    python tests/benchmarks/predict.py [--rounds 3]

Prints the best of the rounds in turn, and the ratio; the first call apart, as it imports. It never fails by time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import nbguard


def resnet50() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a ResNet-50 and a batch of 16 pictures of 224 × 224."""
    import torchvision

    return torchvision.models.resnet50(num_classes=10), torch.zeros(16, 3, 224, 224), torch.zeros(16, dtype=torch.long)


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return twelve layers of 768 numbers, and a batch of 8 times 128 of them."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(768, 10))
    return model, torch.zeros(8, 128, 768), torch.zeros(8, 128, dtype=torch.long)


def step_of(model: nn.Module) -> Callable[[Any], None]:
    """Return a training step of a model."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        x, y = batch
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for make in (resnet50, transformer):
        model, x, y = make()
        step = step_of(model)
        predict, run = partial(nbguard.predict, step, (x, y), gpu="T4"), partial(step, (x, y))
        first, predicted, real = seconds(predict), [], []
        for _ in range(rounds):
            predicted.append(seconds(predict))
            real.append(seconds(run))
        print(
            f"{make.__name__:12s} first prediction {first:.2f} s, then {min(predicted):.2f} s; one step on one CPU thread "
            f"{min(real):.2f} s: {min(predicted) / min(real):.2f} of a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
