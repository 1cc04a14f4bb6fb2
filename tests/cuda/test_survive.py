"""A training goes on where the device has room for a part of its batch only."""

from __future__ import annotations

import json
from collections.abc import Callable
from textwrap import indent

import pytest

from tests.cuda.conftest import KEPT_WORKSPACES
from tests.kernels import Kernel

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
    with only(int(0.7 * peak)):
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


_IN_PIECES = """
import gc, torch
from torch import nn
import nbguard
from tests.room.programs import sign, signature
from nbguard.training.survive import pieces
pieces._is_alike = lambda *_: True  # values of the fake device mean nothing

def mib(n): return torch.empty(int(n * 2**20), dtype=torch.uint8, device="cuda")
def comb(count, size, live):
    whole = [mib(size) for _ in range(count)]
    del whole
    return [mib(live) for _ in range(count * size // live)][:: size // live]

def run(as_function, ends):
    model = nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 1)).cuda()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.zeros(16384, 8, device="cuda")
    for number, weight in enumerate(model.parameters()):
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    gc.collect(); torch.cuda.empty_cache()
    teeth = comb(14, 64, 16)
    for number, tooth in enumerate(teeth): sign(tooth, number)
    before = [signature(tooth) for tooth in teeth], [weight.detach().cpu() for weight in model.parameters()]
    where = [weight.data_ptr() for weight in model.parameters()]
    def step():
        with torch.set_grad_enabled(ends != "validation"):
            loss = model(x).square().mean()
        if ends == "training": loss.backward()
    try:
        step()
        print("fits")
    except torch.OutOfMemoryError: pass
    model.zero_grad()
    guard = nbguard.survive(model, optimizer)
    if as_function: guard(step)()
    else:
        with guard: step()
    same = [signature(tooth) for tooth in teeth] == before[0] and [weight.data_ptr() for weight in model.parameters()] == where
    same = same and all(torch.equal(weight.detach().cpu(), one) for weight, one in zip(model.parameters(), before[1]))
    print(same, {str(tooth.device) for tooth in teeth}, [(change.moved > 0, change.size) for change in guard.changes][-1])

for as_function in (True, False):
    for ends in ("training", "validation"):
        run(as_function, ends)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
"""


def test_moves_make_room_first(fake_cuda_run: Callable[..., str]) -> None:
    """On a device whose free memory lies in pieces a batch runs whole, and nothing that moved is another afterwards."""
    printed = fake_cuda_run(_IN_PIECES, bytes=2**30, context=0)
    said = [line for line in printed.splitlines() if not line.startswith("nbguard")]
    assert said == ["True {'cuda:0'} (True, 0)"] * 4


_WORKSPACE = """
import torch
from nbguard.training.survive.state import StateBefore, cleared

MIB = 2**20
def failed():
    '''Run out of memory after a product of matrices whose workspace lies in a segment of 64 MiB.'''
    activations = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del activations
    weight @ weight
    try:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        cleared(error, before)
    return torch.cuda.memory_reserved() < 32 * MIB

weight, before = torch.zeros(64, 64, device="cuda"), StateBefore([])
graph = torch.cuda.CUDAGraph()
print(failed())
del graph
print(failed())
"""


def test_no_workspace_keeps_a_segment_of_the_try_that_failed(fake_cuda_run: Callable[..., str]) -> None:
    """A piece, or the optimizer, may need it in one piece. A CUDA graph may have recorded the address."""
    assert fake_cuda_run(_WORKSPACE, **KEPT_WORKSPACES).split() == ["False", "True"]


_CARD = """
import gc, torch
from torch import nn
from fastai.basics import *
from nbguard.training.survive import pieces
pieces._is_alike = lambda *_: True  # values of the fake device mean nothing
def body(*layers): return nn.Sequential(nn.Linear(8, 131072), nn.GELU(), *layers, nn.Linear(131072, 1))
rows = [(torch.ones(8), torch.ones(1))] * 512
def loaders(): return DataLoaders(*[DataLoader(rows, bs=512) for _ in "12"], device="cuda")
def learner(*layers): return Learner(loaders(), body(*layers).cuda(), loss_func=nn.MSELoss(), cbs=[])
def fit(learn, **options):
    with learn.no_bar(), learn.no_logging(): learn.fit(1, **options)
"""
_LOOP = """
for _ in range(2):
    loss = net(torch.zeros(512, 8, device="cuda")).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learner", "loop"])
def test_the_line_on_the_card_lets_the_training_through(kind: str, fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=True, bytes=700 * 2**20, context=0)
    kernel.run(_CARD).ok()
    kernel.run("%load_ext nbguard").ok()
    made = "learn = learner()" if kind == "learner" else "net = body().cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)"
    kernel.run(made).ok()
    cell = "fit(learn)" if kind == "learner" else _LOOP
    assert kernel.run(cell).error is not None

    card = json.loads(kernel.run("%gpumem oom --json").ok().text)
    line = card["survival"]["command"]
    assert (
        line == "import nbguard; learn.add_cb(nbguard.SurviveOOM())" if kind == "learner" else "with nbguard.survive(net, opt):"
    )
    assert line in kernel.run("%gpumem oom").ok().text
    kernel.run("%reset_gpu").ok()
    if kind == "learner":
        kernel.run(line).ok()
        printed = kernel.run(cell).ok().stdout
    else:
        printed = kernel.run(f"import nbguard\n{line}\n{indent(cell, '    ')}").ok().stdout
    assert "same weights" in printed

    if kind == "learner":
        kernel.run("learn = None; other = learner(nn.BatchNorm1d(131072))").ok()
        assert kernel.run("fit(other)").error is not None
        assert json.loads(kernel.run("%gpumem oom --json").ok().text)["survival"] is None, "it would be refused"
