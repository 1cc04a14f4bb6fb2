"""Two ranks of DistributedDataParallel, one of which runs out of memory: none hangs, and the weights are the same."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.survive.planted import largest_difference

_PROGRAM = """
import os, sys, datetime, torch, nbguard
from torch import nn
import torch.distributed as dist
from tests.survive.planted import TooLarge, Planted, net
rank, folder = int(os.environ["RANK"]), sys.argv[1]
torch.set_num_threads(1)
meet, wait = f"file://{folder}/meet", datetime.timedelta(seconds=100)
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=wait)
class Exchanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, x):
        dist.all_reduce(x[0].clone())
        return self.body(x)
xs, results = torch.randn(3, 2, 8, 6, generator=torch.Generator().manual_seed(1)), {}
for case in ("whole", "one", "both", "inner", "exchanging", "backward"):
    model = Exchanging() if case == "exchanging" else net()
    model.register_buffer("constant", torch.ones(3))  # which DDP sends to all ranks in each call
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    guard = nbguard.survive(model if case == "inner" else ddp, optimizer)
    fails = case in ("both", "exchanging") or (case in ("one", "inner") and rank == 1)
    error = ""
    try:
        with guard:
            for number in range(3):
                planted = Planted(12 * (case == "backward" and rank == 1 and number == 1))
                with TooLarge(4 if fails and number else 100), planted:
                    loss = ddp(xs[number, rank]).square().mean()
                    planted.is_armed = True
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except torch.OutOfMemoryError:
        error = "out of memory"
    except Exception as other:
        error = type(other).__name__
    results[case] = [model.state_dict(), [(change.pieces, change.refusal) for change in guard.changes], error]
torch.save(results, f"{folder}/{rank}")
os._exit(0)  # without waiting for the other rank, as after a failure
"""
CASES = dict[str, list[Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[CASES]:
    """Return each rank's (state, changes, error) of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = ":".join(path for path in sys.path if path)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(folder)],
            env={"PYTHONPATH": paths, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "HOME": str(folder)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(400) for rank in started] == [0, 0]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    return [torch.load(folder / str(rank)) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "both", "inner"])
def test_a_rank_divides_its_call_and_the_other_only_waits(case: str, ranks: list[CASES]) -> None:
    for rank in range(2):
        state, changes, error = ranks[rank][case]
        assert error == ""
        assert largest_difference(ranks[rank]["whole"][0], state) <= 1e-6
        assert changes == ([(2, "")] if rank == 1 or case == "both" else [])


@pytest.mark.parametrize(("case", "words"), [("backward", "exchanged the gradients"), ("exchanging", "exchanged tensors")])
def test_what_other_ranks_take_part_in_is_refused(case: str, words: str, ranks: list[CASES]) -> None:
    """The rank raises at once, as without a guard; whoever has launched the ranks ends the others."""
    _, changes, error = ranks[1][case]
    assert error == "out of memory"
    assert [words in refusal for _, refusal in changes] == [True]
