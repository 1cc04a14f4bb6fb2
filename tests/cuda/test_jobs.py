"""Scripts and ranks that run out of a device's memory: the card has their variables, the merged report who was first."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.cli import main
from nbguard.frontend.jobs.folder import job_report
from tests.fake_cuda.launch import environment
from tests.fake_cuda.plugin import fake_settings
from tests.jobs.programs import NBGUARD, ended

MIB = 1024**2
pytestmark = pytest.mark.fakecuda

_NET = """
import os, torch
from torch import nn
def mib(n): return torch.empty(n << 20, dtype=torch.uint8, device="cuda")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4096, 4096, bias=False)
    def forward(self, x): return self.body(x)
outputs = []
def train(net, batch):
    losses = []
    for _ in range(100):
        losses.append(net(batch).detach())
"""
_SCRIPT = f"""{_NET}
kept = mib(100)
def main():
    data = mib(200)
    train(Net().cuda(), torch.empty(1024, 4096, device="cuda"))
main()
"""
_RANK = f"""{_NET}
import torch.distributed as dist
dist.init_process_group("gloo")
def main():
    data = mib(100)
    train(Net().cuda(), torch.empty(1024, 4096, device="cuda"))
if dist.get_rank() == 2:
    main()
dist.barrier()
"""


def _variables(folder: Path) -> dict[str, str]:
    return environment(fake_settings(bytes=1024 * MIB, context=100 * MIB), folder)


@pytest.mark.slow
def test_the_card_of_a_script_has_the_variables_of_its_functions(fake_cuda_library: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)

    run = ended([*NBGUARD, "--report", "reports", "train.py"], tmp_path, _variables(fake_cuda_library))

    assert run.returncode == 1, run.stderr
    assert run.stdout == ""
    assert "torch.OutOfMemoryError: CUDA out of memory" in run.stderr
    (failure,) = job_report(tmp_path / "reports").failures
    card = failure.card
    assert card is not None
    held = {holder.label: holder.retained for holder in card.holders}
    assert held["kept"] == 100 * MIB
    assert held["main() → data"] == 200 * MIB
    assert held["train() → net"] == 64 * MIB
    assert held["train() → losses"] % (16 * MIB) == 0
    assert held["train() → losses"] >= 400 * MIB
    assert sum(held.values()) <= card.held
    note = card.asked.note
    assert note is not None
    assert note.counts is not None, "PyTorch's observer has noted the moment"
    assert note.allocated - card.held == 0, "the failed operation had allocated nothing yet"
    assert "train() → losses grows" in card.fixes[0].words
    assert [fix.commands for fix in card.fixes if "%" in "".join(fix.commands)] == [], "lines of a notebook"
    assert card.airbag is not None
    assert card.airbag.command == 'nbguard.airbag("4GiB")'


def _torchrun(ranks: int) -> list[str]:
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--log-dir", "logs", "--nproc-per-node", str(ranks)]


@pytest.mark.slow
def test_of_four_ranks_the_one_that_ran_out_has_the_card_and_the_others_are_named(
    fake_cuda_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(_RANK)
    ours = ["-m", "nbguard", "run", "--report", "reports", "train.py"]

    run = ended([*_torchrun(4), *ours], tmp_path, _variables(fake_cuda_library))

    assert run.returncode == 1, run.stderr
    assert re.findall(r"nbguard, rank (\d) of (\d)", run.stderr, re.MULTILINE) == [("2", "4")]
    assert run.stderr.count("cuda:0 had no room for") == 1
    assert main(["report", str(tmp_path / "reports"), "--json"]) == 1
    merged: dict[str, Any] = json.loads(capsys.readouterr().out)
    first, *others = merged["failures"]
    assert (first["rank"], first["world"], first["launcher"]) == (2, 4, "torchrun")
    assert first["place"] == "train.py:9 in forward()"
    assert first["card"]["kind"] == "oom_card"
    assert all(other["card"] is None for other in others)
    assert sorted([*merged["silent"], *(other["rank"] for other in others)]) == [0, 1, 3]
    assert main(["report", str(tmp_path / "reports")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Rank 2 ran out of memory")
    assert [line.split()[0] for line in text.splitlines() if re.match(r" +\d ", line)] == sorted(
        ["2", "0", "1", "3"], key=lambda rank: [2, *(o["rank"] for o in others), *merged["silent"]].index(int(rank))
    )


@pytest.mark.slow
def test_ranks_that_do_not_fail_say_and_leave_nothing(fake_cuda_library: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_RANK.replace("== 2", "== 7") + "dist.destroy_process_group()")

    run = ended(
        [*_torchrun(2), "-m", "nbguard", "run", "--report", "reports", "train.py"], tmp_path, _variables(fake_cuda_library)
    )

    assert (run.returncode, run.stdout) == (0, "")
    assert "nbguard" not in run.stderr
    assert not (tmp_path / "reports").exists()
