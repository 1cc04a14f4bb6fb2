"""The rules of CUDA's kernels, operator by operator, beside PyTorch's own allocator on the fake device."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.prediction.emulation.emulation import Emulation
from nbguard.prediction.hardware import Gpu
from tests.prediction.operators import probe

_PROBE = """
import json, torch
from tests.prediction.operators import probe
cuda = torch.cuda
counters = cuda.memory_allocated, cuda.max_memory_allocated, cuda.reset_peak_memory_stats
print(json.dumps(probe("cuda", *counters, {has_cudnn_attention})))
"""
_ABOVE = ("bits", "attention", "embeddings", "rows by index", "sorted")
"""Calls that may take less than is predicted: a mode makes PyTorch compose them out of place, or the rule is a bound."""


def _predicted(gpu: Gpu) -> dict[str, Any]:
    emulation = Emulation(gpu, AllocatorSettings())
    model = emulation.device.model

    def reset() -> None:
        emulation.settle()
        model.peak_allocated = model.allocated

    def allocated() -> int:
        emulation.settle()
        return model.allocated

    with emulation:
        found = probe("meta", allocated, lambda: model.peak_allocated, reset, gpu.architecture >= (9, 0))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("arch", [(8, 0), (9, 0)], ids=["8.0", "9.0"])
def test_operators_take_what_they_take_on_cuda(arch: tuple[int, int], fake_cuda_run: Callable[..., str]) -> None:
    """A failure names the operator whose rule this PyTorch no longer follows."""
    code = _PROBE.format(has_cudnn_attention=arch >= (9, 0))
    real = json.loads(fake_cuda_run(code, arch=f"{arch[0]}.{arch[1]}").splitlines()[-1])
    found = _predicted(Gpu(name="fake", architecture=arch))

    different = {name: (found[name], real[name]) for name in real if found[name] != real[name]}
    exact = {name: both for name, both in different.items() if not any(word in name for word in _ABOVE)}
    assert exact == {}
    assert len(different) < 0.15 * len(real)
    for name, (foreseen, measured) in different.items():  # never less at once, and the same is kept
        for (peak, kept), (real_peak, real_kept) in zip(filter(None, foreseen), filter(None, measured), strict=True):
            assert peak >= real_peak, name
            assert kept == real_kept, name
    assert torch.ops.aten.dropout(torch.ones(3, device="meta"), 0.0, True).shape == (3,)
