"""Jobs of real ranks under `watch_ranks`: a few in every run, with NBGUARD_THOROUGH=1 all faults, launched in all ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.planted import FAULTS, HEALTHY, Planted
from tests.thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 2.0
LATE = 5.0  # seconds after the timeout within which the cause is said, on a machine that does nothing else
LIVE = ("skips_before_a_barrier", "fewer_batches", "another_size", "raises_on_one_rank")


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "MASTER_", "OMP_"))}
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        **kept,
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def run(folder: Path, *command: str, timeout: float = 900) -> None:
    whole = [sys.executable, "-W", "ignore", "-m", *command]
    job = subprocess.Popen(
        whole,
        cwd=ROOT,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        job.wait(timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def check(fault: Planted, folder: Path, world: int) -> None:
    """Every rank that is left has said the cause; in the thorough tests: in time."""
    paths = [path for rank in range(world) if (path := folder / f"{fault.name}-{world}-{rank}.json").exists()]
    said: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
    assert any(each["faults"] for each in said), [path.read_text() for path in folder.glob(f"{fault.name}*.log")]
    for each in said:
        if not each["faults"]:
            continue  # a rank that had ended before the others got stuck
        cause = each["faults"][0]
        assert cause["kind"] in fault.kinds, cause
        assert cause["ranks"] == fault.culprits(world), cause
        assert fault.collective in ("", cause["collective"])
        assert not fault.is_placed or cause["place"].partition(" in ")[0] in fault.lines
        assert not THOROUGH or each["late"] - (0 if fault.ends else TIMEOUT) < LATE


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the jobs of two ranks that run in every test have left what they said."""
    folder = tmp_path_factory.mktemp("ranks")
    run(folder, "tests.ranks.jobs", str(folder), "2", *LIVE, "one_rank_is_ten_times_slower", "messages_and_collectives")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_two_ranks_that_hang_or_fail_say_why(name: str, forked: Path, torch_process: None) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    check(fault, forked, 2)


def test_jobs_that_fail_leave_no_file(forked: Path, torch_process: None) -> None:
    assert [file.name for file in (forked / "tmp").glob("nbguard-*")] == []


@pytest.mark.parametrize("name", ["one_rank_is_ten_times_slower", "messages_and_collectives"])
def test_two_healthy_ranks_say_nothing_and_leave_nothing(name: str, forked: Path, torch_process: None) -> None:
    for rank in range(2):
        assert json.loads((forked / f"{name}-2-{rank}.json").read_text()) == {"faults": None, "late": None, "texts": []}
        assert json.loads((forked / f"{name}-2-{rank}.left").read_text()) == {"threads": [], "hooks": 0, "files": []}


@pytest.mark.skipif(not THOROUGH, reason="some 40 minutes: NBGUARD_THOROUGH=1")
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "notebook", "fork"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_under_every_launcher(
    fault: Planted, world: int, launcher: str, tmp_path: Path, torch_process: None
) -> None:
    launch(launcher, [fault.name], world, tmp_path)
    check(fault, tmp_path, world)


@pytest.mark.skipif(not THOROUGH, reason="minutes: NBGUARD_THOROUGH=1")
@pytest.mark.parametrize("launcher", ["torchrun", "fork"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", HEALTHY)
def test_no_healthy_job_is_warned_of(name: str, world: int, launcher: str, tmp_path: Path, torch_process: None) -> None:
    launch(launcher, [name], world, tmp_path)

    for rank in range(world):
        assert json.loads((tmp_path / f"{name}-{world}-{rank}.json").read_text())["texts"] == []


def in_notebook(folder: Path, *arguments: str) -> None:
    """Launch by `notebook_launcher`; again where no rank has come as far as its watch.

    It forks while a thread of the store of PyTorch 2.13 may be asking glibc for the name of a peer. The rank has its lock then,
    without the thread that would give it back, and waits for it at its first connection: one launch of some thirty.
    """
    for attempt in range(3):
        try:
            run(folder, "tests.ranks.jobs", "notebook", str(folder), *arguments, timeout=60)
        except subprocess.TimeoutExpired:
            if attempt == 2 or any(folder.glob("*.facts")):
                raise
        else:
            return


def launch(launcher: str, names: Sequence[str], world: int, folder: Path) -> None:
    rank = ("tests.ranks.jobs", "rank", str(folder), *names)
    if launcher == "torchrun":
        run(folder, "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", *rank)
    elif launcher == "accelerate":
        # `--cpu` is one process: ACCELERATE_USE_CPU makes several of those for GPUs
        options: tuple[str, ...] = (
            "--multi_gpu",
            "--num_processes",
            str(world),
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        )
        options += ("--dynamo_backend", "no", "--main_process_port", "0", "--num_cpu_threads_per_process", "1")
        run(folder, "accelerate.commands.launch", *options, "-m", *rank)
    elif launcher == "notebook":
        in_notebook(folder, str(world), *names)
    else:
        run(folder, "tests.ranks.jobs", str(folder), str(world), *names)
