"""`watch_ranks` around `init_process_group`: real processes, of which some never come."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nbguard.training.ranks.analysis.diagnosis import RankPlace
from nbguard.training.ranks.analysis.flight_dump import MeetingPoint, PortOwner, rendezvous_wait

_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
import nbguard
watch = nbguard.watch_ranks(timeout=1.5)
try:
    with watch:
        dist.init_process_group("gloo", timeout=timedelta(seconds=int(sys.argv[1])))
except Exception as error:
    print(type(error).__name__)
fault = watch.diagnosis.faults[0] if watch.diagnosis else None
print(fault and (fault.kind, fault.ranks, fault.collective), fault and fault.place, flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, number: int, seconds: int, port: int) -> subprocess.Popen[str]:
    """Start a rank of a job of two."""
    script = folder / "train.py"
    script.write_text(_RANK)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, str(script), str(seconds)],
        env={**os.environ, **place, "RANK": str(number), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_never_comes_says_so_while_it_waits(
    tmp_path_factory: pytest.TempPathFactory, torch_process: None
) -> None:
    """Seen: twenty seconds of silence, then PyTorch's traceback. Each rank is of another job; both wait at once."""
    ports = free_port(), free_port()
    jobs = [start(tmp_path_factory.mktemp("job"), rank, 8, ports[rank]) for rank in (0, 1)]
    says = "for rank 1", f"rank 1 waits in `init_process_group` for rank 0 at 127.0.0.1:{ports[1]}, where no process listens"
    for rank, job in enumerate(jobs):
        printed, logged = job.communicate(timeout=240)

        assert f"('rendezvous', ({1 - rank},), 'init_process_group') train.py:9" in printed, logged
        assert logged.count(f"nbguard, rank {rank}: ") == 1
        assert logged.count(f"nbguard: rank {rank} of 2, process {job.pid} on ") == 1
        assert says[rank] in logged


@pytest.mark.slow
def test_ranks_that_meet_say_nothing(tmp_path: Path, torch_process: None) -> None:
    port = free_port()
    for job in [start(tmp_path, rank, 120, port) for rank in (0, 1)]:
        printed, logged = job.communicate(timeout=240)
        assert "rendezvous" not in printed or "waits in" in logged  # a machine that stalls may make one wait for the other
        assert "Error" not in printed


_PLACE = RankPlace(rank=1, state="running", calls=0, waits_in="init_process_group", stands="In[3], line 2")
_THERE = MeetingPoint(host="127.0.0.1", port=29977, is_here=True)


@pytest.mark.parametrize(
    ("point", "late", "says"),
    [
        (_THERE, (0,), "where no process listens"),
        (MeetingPoint(host="10.1.1.1", port=1, is_here=False), (0,), "another host"),
        (MeetingPoint(host="h", port=1, is_here=True, listener=PortOwner(7, "nc -l", is_job=False)), (0,), "not part of"),
        (MeetingPoint(host="h", port=1, is_here=True, listener=PortOwner(7, "x", is_job=True)), (2, 3), "rank 0 is there"),
        (MeetingPoint(host="h", port=1, is_here=True, listener=PortOwner(None, "")), (0,), "another user's"),
        (None, (0, 2, 3), "for the other 3 ranks"),
    ],
)
def test_a_wait_is_told_by_who_listens(point: MeetingPoint | None, late: tuple[int, ...], says: str) -> None:
    (fault,) = rendezvous_wait(_PLACE, 4, point).faults

    assert (fault.kind, fault.ranks, fault.place) == ("rendezvous", late, "In[3], line 2")
    assert says in fault.what
    assert fault.remedy
