"""Fits on the GPU with and without a profile: their weights, what they wait for, and what the report says."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import nbguard

Json = dict[str, Any]
_BATCHES = 150
_LATE = 120
"""A batch that a profile does not look at."""


def _batches(count: int = _BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(count, 32, 64, generator=generator), torch.randint(0, 2, (count, 32), generator=generator)
    return [(x[at].pin_memory(), y[at].pin_memory()) for at in range(count)]


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2)).cuda()


def _loop(dtype: torch.dtype | None = None, spoil: int = 0, waiting: str = "default") -> list[torch.Tensor]:
    """Train. `spoil`: the batch whose loss is NaN; `waiting`: torch's mode for calls that wait for the GPU."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    torch.cuda.set_sync_debug_mode(waiting)
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(_batches(), batch_size=None), 1):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(net(x), y)
            if number == spoil:
                loss = loss * torch.full((), torch.nan, device="cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return [parameter.detach() for parameter in net.parameters()]


def _fastai(*, half: bool = False) -> list[torch.Tensor]:
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner
    from fastai.callback.fp16 import MixedPrecision
    from fastai.callback.progress import ProgressCallback  # noqa: F401 - gives Learner its no_bar

    random.seed(7)  # loaders shuffle by it, and the imports have taken from it
    rows = [(x, y) for xs, ys in _batches() for x, y in zip(xs, ys, strict=True)]
    loaders = DataLoaders.from_dsets(rows, rows[:320], bs=32, num_workers=0, device=torch.device("cuda"))
    learn = Learner(loaders, _net(), loss_func=CrossEntropyLossFlat(), cbs=[MixedPrecision()] if half else [])
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)
    return [parameter.detach() for parameter in learn.model.parameters()]


TRAININGS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "plain": _loop,
    "plain bfloat16": lambda: _loop(torch.bfloat16),
    "plain float16": lambda: _loop(torch.float16),
    "fastai": _fastai,
    "fastai float16": lambda: _fastai(half=True),
}


def names() -> list[str]:
    """Return the trainings that can run here."""
    return [name for name in TRAININGS if importlib.util.find_spec("fastai") or not name.startswith("fastai")]


def _run(training: Callable[[], Any], profile: AbstractContextManager[Any]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    with contextlib.redirect_stdout(io.StringIO()), profile:
        weights: list[torch.Tensor] = training()
    torch.cuda.synchronize()
    return [*(weight.cpu() for weight in weights), torch.get_rng_state(), torch.cuda.get_rng_state()]


def identical(name: str) -> bool:
    """Say whether a training ends with the same bits without a profile, again without, and with each kind of profile."""
    plain = _run(TRAININGS[name], nullcontext())
    options: tuple[Json, ...] = ({}, {"memory": True}, {"stop_on_nan": True})
    others = [
        _run(TRAININGS[name], nullcontext()),
        *(_run(TRAININGS[name], nbguard.profile_fit(show=False, **each)) for each in options),
    ]
    return all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))


def without_waiting() -> Json:
    """Profile a loop in which PyTorch refuses each call that waits for the GPU; return what the report says."""
    _loop(waiting="error")  # without a profile none of its calls does
    with contextlib.redirect_stdout(io.StringIO()), nbguard.profile_fit(show=False) as profile:
        _loop(waiting="error")
    report = profile.report
    return {"notes": list(report.notes), "batches": report.timing.batches, "busy": report.timing.busy}


def late_nan() -> Json:
    """Profile a loop whose loss is NaN in a batch that the profile does not look at; return its first sentence."""
    with contextlib.redirect_stdout(io.StringIO()), nbguard.profile_fit(show=False) as profile:
        _loop(spoil=_LATE)
    return {"first": profile.report.first[0], "batch": _LATE}
