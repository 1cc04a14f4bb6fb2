"""Fits for the tests: small, seeded, and the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fastai.basics import (
    Callback,
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    accuracy,
    nn,
)

ITEMS = 64
BATCH = 8


def items(count: int = ITEMS) -> list[tuple[Any, Any]]:
    found = torch.Generator().manual_seed(3)
    return [(torch.randn(6, generator=found), torch.tensor(at % 2)) for at in range(count)]


def loaders(workers: int = 0, count: int = ITEMS, **kw: Any) -> Any:
    data = items(count)
    return DataLoaders.from_dsets(data, data[: count // 2], bs=BATCH, num_workers=workers, device="cpu", **kw)


def model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def learner(*cbs: Any, workers: int = 0, count: int = ITEMS) -> Any:
    found = Learner(loaders(workers, count), model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=list(cbs))
    found.remove_cbs([each for each in found.cbs if each.name == "progress"])
    return found


def quiet_fit(learn: Any, epochs: int = 2, **kw: Any) -> Any:
    with learn.no_logging():
        learn.fit(epochs, 1e-2, **kw)
    return learn


def torch_loader(workers: int = 0, count: int = ITEMS, **kw: Any) -> Any:
    return torch.utils.data.DataLoader(items(count), batch_size=BATCH, num_workers=workers, **kw)


def drawn(batches: int) -> Iterator[tuple[Any, Any]]:
    """Batches as many a loop draws them: from tensors in memory."""
    data, targets = torch.randn(64, 6), torch.randint(2, (64,))
    for _ in range(batches):
        rows = torch.randint(64, (BATCH,))
        yield data[rows], targets[rows]


def train(epochs: int = 2, *, loader: Any = None, each: Any = None) -> Any:
    """A plain loop with an evaluation after each epoch; `each(loss)` is called per batch. Returns the model."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    measure = nn.CrossEntropyLoss()
    loader = torch_loader() if loader is None else loader
    for _ in range(epochs):
        for x, y in loader:
            loss = measure(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if each is not None:
                each(loss)
        with torch.no_grad():
            for x, _y in loader:
                net(x)
    return net


class Fails(Callback):
    """Raises an error at an event of batch `at`."""

    def __init__(self, event: str = "after_pred", at: int = 9, error: type[BaseException] = ZeroDivisionError) -> None:
        self.at, self.error, self.seen = at, error, 0
        setattr(self, event, self._fail)

    def _fail(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise self.error("planted")
