"""A notebook with a sidebar beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.frozen import frozen_kernels  # noqa: F401 - for all tests here
from tests.kernels import Cell, Kernel
from tests.panels import Panel

LEARNER = """
import gc, threading, time, weakref, torch
from torch import nn
from fastai.basics import *
torch.manual_seed(0)
x, y = torch.randn(1024, 64), torch.randint(0, 3, (1024,))
def loader(n): return DataLoader(torch.utils.data.TensorDataset(x[:n], y[:n]), bs=32, num_workers=0)  # two tensors to look at
def learner(*layers): return Learner(DataLoaders(loader(1024), loader(128)), nn.Sequential(*(layers or net())), loss_func=CrossEntropyLossFlat())
def net(): return nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3)
class UntilTold(Callback):
    def after_batch(self):
        if Path("enough").exists(): raise CancelFitException
"""
FIT = "learn.fit(10_000, cbs=UntilTold())"
"""Trains for as long as `training` wants it, on a machine of any speed."""


@contextmanager
def running(kernel: Kernel, code: str) -> Iterator[Callable[[], Cell]]:
    """Run a cell beside what follows. The function given returns what came of the cell, when it has ended."""
    found: list[Cell] = []
    thread = threading.Thread(target=lambda: found.append(kernel.run(code)))
    thread.start()

    def ended() -> Cell:
        thread.join(90)
        return found[0]

    try:
        yield ended
    finally:
        thread.join(90)


@contextmanager
def held(kernel: Kernel, code: str = "pass", before: str = "pass") -> Iterator[Callable[[], None]]:
    """Run a cell beside what follows, until the function given is called; `before` and `code` are the rest of it."""
    gate = kernel.cwd / "gate"
    waits = "import pathlib, time\nwhile not pathlib.Path('gate').exists(): time.sleep(0.01)\npathlib.Path('gate').unlink()"
    with running(kernel, f"{before}\n{waits}\n{code}") as ended:

        def let_go() -> None:
            gate.touch()
            ended().ok()

        try:
            yield let_go
        finally:
            gate.touch()
            ended()
            gate.unlink(missing_ok=True)


@contextmanager
def training(kernel: Kernel) -> Iterator[Callable[[], Cell]]:
    """Let `learn` train beside what follows. The function given ends the fit and returns what came of the cell."""
    enough = kernel.cwd / "enough"
    with running(kernel, FIT) as ended:

        def end() -> Cell:
            enough.touch()
            return ended()

        try:
            yield end
        finally:
            end()
            enough.unlink()


@pytest.fixture
def panel(kernel: Kernel) -> Iterator[Panel]:
    """A panel that looks at a kernel with a few experiments at hand. Its kernel is `panel.kernel`."""
    kernel.run(LEARNER).ok()
    kernel.run("%load_ext nbguard").ok()
    panel = Panel(kernel)
    panel.hello()
    yield panel
    panel.stop()


@pytest.fixture
def plain_panel(plain_kernel: Kernel) -> Iterator[Panel]:
    """A panel that looks at a kernel without PyTorch."""
    plain_kernel.run("%load_ext nbguard").ok()
    panel = Panel(plain_kernel)
    panel.hello()
    yield panel
    panel.stop()
