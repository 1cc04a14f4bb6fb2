"""Models with one planted fault each, by which a step does not repeat; and what a diagnosis has to name."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROWS = 256
WIDTH = 8


@torch.library.custom_op("planted::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """An operation that is nondeterministic by itself, as one that races on a GPU."""
    return x * (1 + int.from_bytes(os.urandom(2), "little") / 2**20)


@torch.library.custom_op("planted::steady", mutates_args=())
def steady(x: torch.Tensor) -> torch.Tensor:
    """An operation with a nondeterministic backward pass."""
    return x.clone()


steady.register_autograd(lambda _, grad: noise(grad))
noise.register_autograd(lambda _, grad: grad * 1.0)


class Forward(nn.Module):
    def forward(self, x: Any) -> Any:
        return noise(x)


class Backward(nn.Module):
    def forward(self, x: Any) -> Any:
        return steady(x)


class Between(nn.Module):
    """The fault is in the parent's own code, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.two(noise(self.one(x)))


class Put(nn.Module):
    """PyTorch's own: which of several values for one place stays is a matter of order; deterministic mode refuses it."""

    def forward(self, x: Any) -> Any:
        places = torch.zeros(x.numel(), dtype=torch.long)
        return x + torch.zeros(1).put_(places, x.detach().flatten() * 1e-3, accumulate=False)


class Unpool(nn.Module):
    def forward(self, x: Any) -> Any:
        pooled, places = functional.max_pool1d(x[:, None], 2, return_indices=True)
        return functional.max_unpool1d(pooled, places, 2)[:, 0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + self.calls)


class Momentum(nn.Module):
    """A running mean as a plain tensor: no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Any) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.queue.append(x.detach().mean())
        return x + sum(self.queue)


class Shared(nn.Module):
    """A class attribute that counts."""

    calls = 0

    def forward(self, x: Any) -> Any:
        type(self).calls += 1
        return x * (1 + type(self).calls)


STEPS = 0


class Global(nn.Module):
    def forward(self, x: Any) -> Any:
        global STEPS
        STEPS += 1
        return x * (1 + STEPS)


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def scaled(x: Any) -> Any:
            nonlocal calls
            calls += 1
            return x * (1 + calls)

        self.scaled = scaled

    def forward(self, x: Any) -> Any:
        return self.scaled(x)


class TorchGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Any) -> Any:
        return x + torch.rand(x.shape, generator=self.generator)


class PythonGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: Any) -> Any:
        return x * self.random.random()


class NumpyGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x: Any) -> Any:
        return x * float(self.rng.random())


class NumpyState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.RandomState(3)

    def forward(self, x: Any) -> Any:
        return x * float(self.rng.random_sample())


RNG = np.random.default_rng(5)


class GlobalGenerator(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * float(RNG.random())


class Dropout(nn.Module):
    """A dropout whose mask comes from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = torch.Generator()

    def forward(self, x: Any) -> Any:
        return x * (torch.rand(x.shape, generator=self.masks) > 0.5)


class Clock(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * (time.perf_counter_ns() % 1000)


class System(nn.Module):
    """`SystemRandom` has no state that could be kept."""

    def forward(self, x: Any) -> Any:
        return x * random.SystemRandom().random()


class Iterator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = itertools.count(1)

    def forward(self, x: Any) -> Any:
        return x * next(self.steps)


class Identity(nn.Module):
    """What Python calls an object differs in each run."""

    def forward(self, x: Any) -> Any:
        one = object()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))  # it is never freed: no other object is where it is
        return x * (1 + id(one) % 1_000_003)


class Norm(nn.Module):
    """A batch norm that keeps its statistics itself, as numbers of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 1.0

    def forward(self, x: Any) -> Any:
        self.running = 0.9 * self.running + 0.1 * float(x.detach().std())
        return x / self.running


@dataclass(frozen=True)
class Planted:
    """What has to be named of a fault."""

    severity: str
    named: str  # in the sentence
    evidence: str = ""


FAULTS: dict[str, tuple[type[nn.Module], Planted]] = {
    "forward": (Forward, Planted("problem", "`model[1]` in the forward pass", "planted.noise")),
    "backward": (Backward, Planted("problem", "`model[1]` in the backward pass", "planted.noise")),
    "between": (Between, Planted("problem", "`model[1]` in the forward pass", "planted.noise")),
    "put": (Put, Planted("advice", "put_ has no deterministic implementation: `model[1]`")),
    "unpool": (Unpool, Planted("advice", "max_unpooling2d_forward_out has no deterministic implementation: `model[1]`")),
    "counter": (Counter, Planted("advice", "model[1].calls changes in each step")),
    "momentum": (Momentum, Planted("advice", "model[1].mean changes in each step")),
    "memory": (Memory, Planted("advice", "model[1].queue changes in each step")),
    "class attribute": (Shared, Planted("advice", "Shared.calls changes in each step")),
    "global": (Global, Planted("advice", "STEPS changes in each step")),
    "closure": (Closure, Planted("advice", "calls changes in each step")),
    "torch.Generator": (TorchGenerator, Planted("advice", "model[1].generator is a separate generator")),
    "random.Random": (PythonGenerator, Planted("advice", "model[1].random is a separate generator")),
    "numpy Generator": (NumpyGenerator, Planted("advice", "model[1].rng is a separate generator")),
    "numpy RandomState": (NumpyState, Planted("advice", "model[1].rng is a separate generator")),
    "global generator": (GlobalGenerator, Planted("advice", "RNG is a separate generator")),
    "dropout": (Dropout, Planted("advice", "model[1].masks is a separate generator")),
    "clock": (Clock, Planted("problem", "`model[1]` in the forward pass", "Python gives aten.mul.Tensor")),
    "system": (System, Planted("problem", "`model[1]` in the forward pass", "Python gives aten.mul.Tensor")),
    "iterator": (Iterator, Planted("problem", "`model[1]` in the forward pass", "it may be model[1].steps")),
    "identity": (Identity, Planted("problem", "`model[1]` in the forward pass", "Python gives aten.mul.Tensor")),
    "batch norm": (Norm, Planted("advice", "model[1].running changes in each step")),
}


def faulty(kind: type[nn.Module]) -> nn.Module:
    """Return a model with the faulty layer in its middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 2))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for it."""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, 2)
