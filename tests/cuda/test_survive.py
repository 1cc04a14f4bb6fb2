"""A training goes on where the device has room for a part of its batch only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.fakecuda

_CODE = """
import gc, torch
from torch import nn
import nbguard
from nbguard.training.survive import pieces
from tests.cuda.airbag_fits import only
pieces._is_alike = lambda *_: True  # values of the fake device mean nothing

def run(guarded, half):
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    guard = nbguard.survive(model, optimizer)
    with guard if guarded else torch.enable_grad():
        for items in (16384, 16384, 64):
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = model(torch.zeros(items, 512, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(change.batch, change.size) for change in guard.changes if not change.refusal]

def free():
    gc.collect()
    torch.cuda.empty_cache()

torch.zeros(1, device="cuda")
for half in (False, True):
    free()
    torch.cuda.reset_peak_memory_stats()
    run(False, half)
    peak = torch.cuda.max_memory_reserved()
    free()
    with only(int(0.75 * peak)):
        try:
            run(False, half)
        except torch.OutOfMemoryError:
            print("ran out")
        free()
        print(run(True, half)[:1])
        free()
"""


def test_a_batch_that_does_not_fit_runs_in_pieces(fake_cuda_run: Callable[..., str]) -> None:
    said = [line for line in fake_cuda_run(_CODE, bytes=4 * 2**30).splitlines() if not line.startswith("nbguard")]
    assert said == ["ran out", "[(16384, 8192)]"] * 2
