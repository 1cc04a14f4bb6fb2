"""However a job ends, no process and no file of the watch stays: real launches, with NBGUARD_THOROUGH=1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kernels import wait_until
from tests.thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import os, signal, sys, time
import torch, torch.distributed as dist
import nbguard

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
with nbguard.watch_ranks(timeout=600):
    x = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(x)
    open(f"{sys.argv[2]}/ready-{rank}", "w").close()
    if rank == 1 and how == "raises":
        raise ValueError("a broken image")
    if rank == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how in ("SIGTERM", "SIGINT"):
        time.sleep(600)
    dist.all_reduce(x)
"""


def processes(mark: str) -> list[psutil.Process]:
    """Return the processes that have a mark among their arguments."""
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]


@pytest.mark.skipif(not THOROUGH, reason="a minute: NBGUARD_THOROUGH=1")
@pytest.mark.parametrize("how", ["ends", "raises", "is killed", "SIGTERM", "SIGINT"])
def test_nothing_is_left_behind(how: str, tmp_path: Path, torch_process: None) -> None:
    script, temporary = tmp_path / "job.py", tmp_path / "tmp"
    script.write_text(JOB)
    temporary.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [*command, str(script), how, str(tmp_path)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "both ranks", within=300)
        if how.startswith("SIG"):
            launcher.send_signal(getattr(signal, how))
        launcher.wait(300)
        wait_until(lambda: not processes(str(script)), "the ranks to end", within=120)
    finally:
        for process in (launcher, *processes(str(script))):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
    assert (launcher.returncode == 0) == (how == "ends")
    assert list(temporary.glob("nbguard*")) == []
