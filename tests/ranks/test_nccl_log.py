"""NCCL's logs: lines in the form that public issues show (the numbers of NVIDIA/nccl's are in the names), shortened."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.facts import JobFacts, RankFacts, from_text, to_text
from nbguard.training.ranks.analysis.launch_errors import nccl_notes
from nbguard.training.ranks.watchdog import notes_of_nccl

HEALTHY = """host:12:34 [0] NCCL INFO cudaDriverVersion 12040
host:12:34 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
host:12:34 [0] NCCL INFO NET/IB : No device found.
host:12:34 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC
host:12:34 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE
"""
TROUBLES = {
    "duplicate-1241": (
        "host:1:2 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        "ranks 2 and 0 use the same GPU (1000)",
    ),
    "shm-525": (
        "host:1:2 [3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "no room in /dev/shm",
    ),
    "shm-1518": (
        "[1] misc/shmutils.cc:114 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)",
        "no room in /dev/shm",
    ),
    "attach-1589": (
        "g:1:2 [0] misc/shmutils.cc:129 NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-b (size 1)",
        "cannot open another rank's shared memory",
    ),
    "qp-925": (
        "h:1:2 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error No such device",
        "InfiniBand or RoCE does not connect (No such device)",
    ),
    "completion-1814": (
        "h:1:2 [0] NCCL WARN NET/IB : Got completion from peer 29.87.4.2<55921> with status=12 opcode=1 len=0 vendor err 129",
        "to 29.87.4.2 was lost (status 12)",
    ),
    "closed-1612": (
        "[0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 10.10.1.3<36138>",
        "the peer 10.10.1.3 closed its connection",
    ),
    "cuda-1518": (
        "[1] misc/shmutils.cc:103 NCCL WARN Cuda failure 'invalid argument'",
        "CUDA failed in NCCL: invalid argument",
    ),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_known_trouble_is_one_sentence_however_often_it_is_logged(name: str) -> None:
    line, words = TROUBLES[name]
    (note,) = nccl_notes(f"{HEALTHY}{line}\n{line}\n")

    assert words in note


def test_a_healthy_log_says_nothing() -> None:
    assert nccl_notes(HEALTHY) == ()
    assert nccl_notes("\0\xff NCCL WARN something that nobody knows") == ()


def test_sockets_between_hosts_are_said() -> None:
    log = f"{HEALTHY}host:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"  # NVIDIA/nccl 952

    (note,) = nccl_notes(log)
    assert note.endswith("many times slower: no InfiniBand device is found")


def test_the_file_of_this_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.%h.%p"))
    assert notes_of_nccl() == ()

    (tmp_path / f"nccl.{platform.node()}.{os.getpid()}").write_text("x" * 2_000_000 + "\n" + TROUBLES["shm-525"][0])
    assert "no room in /dev/shm" in notes_of_nccl()[0]
    monkeypatch.delenv("NCCL_DEBUG_FILE")
    assert notes_of_nccl() == ()


def test_the_diagnosis_names_it_beside_the_cause() -> None:
    facts = RankFacts(rank=1, world=2, state="died", nccl=("there is no room",))
    assert from_text(to_text(facts)) == facts

    diagnosis = diagnosed(JobFacts(2, (RankFacts(rank=0, world=2, state="running"), facts)))
    assert "NCCL's log of rank 1: there is no room" in diagnosis.faults[0].evidence
