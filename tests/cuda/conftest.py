"""A notebook on the fake CUDA device, and what the device, the driver and the allocator say themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.frozen import frozen_kernels  # noqa: F401 - for all tests here
from tests.kernels import Kernel

PRELUDE = """
import ctypes, gc, os, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x): return self.head(self.body(x).relu())
def mib(n, device='cuda'): return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)
def train(net=None):
    net = net or Net().cuda()
    opt = torch.optim.Adam(net.parameters())
    net(torch.randn(64, 512).cuda()).sum().backward()
    opt.step()
    return net, opt
fake = ctypes.CDLL('libcuda.so.1')
"""

Notebook = Callable[..., Kernel]

KEPT_WORKSPACES = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
"""Settings with which PyTorch 2.15 and newer keep the workspaces of cuBLAS after a call, as older versions do."""


@pytest.fixture
def notebook(fake_cuda_kernel: Callable[..., Kernel]) -> Notebook:
    """`notebook(**settings)` returns a kernel with the prelude and nbguard loaded, CUDA not used yet."""

    def start(*, fastai: bool = False, **settings: object) -> Kernel:
        kernel = fake_cuda_kernel(fastai=fastai, **settings)
        kernel.run(PRELUDE).ok()
        kernel.run("%load_ext nbguard").ok()
        return kernel

    return start


def report(kernel: Kernel, options: str = "") -> dict[str, Any]:
    """Return what `%gpumem` says, as data."""
    found: dict[str, Any] = json.loads(kernel.run(f"%gpumem --json {options}").ok().text)
    return found


def reset(kernel: Kernel, line: str = "") -> dict[str, Any]:
    """Run `%reset_gpu` and return what it says, as data."""
    found: dict[str, Any] = json.loads(kernel.run(f"%reset_gpu --json {line}").ok().text)
    return found


def counters(kernel: Kernel, device: int = 0) -> tuple[int, int]:
    """Return the allocator's own (allocated, reserved) bytes."""
    found: tuple[int, int] = kernel.value(f"torch.cuda.memory_allocated({device}), torch.cuda.memory_reserved({device})")
    return found


def parts(device: dict[str, Any]) -> dict[str, int]:
    """Return the parts of a device's bar by name."""
    return {part["name"]: part["nbytes"] for part in device["parts"]}


def holders(device: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that each holder alone would give back."""
    return {holder["label"]: holder["retained"] for holder in device["holders"]}
