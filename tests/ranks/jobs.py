"""Ranks that run a planted fault under `watch_ranks`.

`python -m tests.ranks.jobs FOLDER WORLD NAME…` forks the ranks of one job after another from one process that has imported
PyTorch. `… rank FOLDER NAME…` is one rank, whose number a launcher gives; of several names each is a job of its own, in a fork
of that rank. `… notebook FOLDER WORLD NAME…` launches them by accelerate's `notebook_launcher`.
Each rank writes FOLDER/NAME-WORLD-RANK.json: the diagnosis, when it was made, its facts.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
import torch._dynamo  # as DistributedDataParallel does when it is made: a second of a core, which is no fault of a rank
import torch.distributed as dist

import nbguard
from nbguard.training.ranks import watchdog
from nbguard.training.ranks.analysis import causes
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis
from nbguard.training.ranks.analysis.facts import JobFacts, to_text
from tests.ranks import faults
from tests.ranks.planted import FAULTS
from tests.thorough import THOROUGH

TIMEOUT = 2.0
PATIENT = TIMEOUT if THOROUGH else 60.0  # where nothing is wrong: a machine that stalls is no fault
LIMIT = 40.0
FAULTY = frozenset(fault.name for fault in FAULTS)


def rank_main(name: str, folder: Path) -> None:
    """Run one rank; RANK and WORLD_SIZE say which."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    path = folder / f"{name}-{world}-{rank}"
    begun, before = time.time(), _folders()
    watch = nbguard.watch_ranks(timeout=TIMEOUT if name in FAULTY else PATIENT)
    warned = _Warnings(watch, path, begun)
    logging.getLogger("nbguard").addHandler(warned)
    _keep_facts(path, warned)
    threading.Thread(target=_end_later, args=(watch, path, warned, begun), daemon=True).start()
    with suppress(*([RuntimeError] if name in FAULTY else [])), watch:
        getattr(faults, name)(rank, world)
        if name in FAULTY and not watch.diagnosis:
            watch.stop()  # this rank is at its end, the others are not: its process goes on
            while not any(folder.glob(f"{name}-{world}-*.json")):
                time.sleep(0.1)
            os._exit(0)
    if not warned.at:
        _write(watch, path, warned, begun)
    if name in FAULTY:
        os._exit(0)
    dist.barrier()  # now all have left the watch
    path.with_suffix(".left").write_text(json.dumps(_left(before)))
    dist.destroy_process_group()


def _left(before: set[str]) -> dict[str, object]:
    """Return what the watch has left behind in this process and its folder: nothing, once all ranks have left it."""
    cells = (getattr(dist, name).__closure__[0].cell_contents for name in ("all_reduce", "broadcast", "barrier", "send"))
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("nbguard")],
        "hooks": sum(cell.__module__.startswith("nbguard") for cell in cells),
        "files": sorted(_folders() - before),
    }


def _folders() -> set[str]:
    return {file.name for file in Path(tempfile.gettempdir()).glob("nbguard-ranks-*")}


class _Warnings(logging.Handler):
    """What the watch has said; the first of it is written at once, as the rank may be ended in that moment."""

    def __init__(self, watch: nbguard.watch_ranks, path: Path, begun: float) -> None:
        super().__init__()
        self._watch, self._path, self._begun = watch, path, begun
        self.texts: list[str] = []
        self.at = 0.0
        self.since = 0.0  # when the ranks got stuck

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if not self.at:  # what is said later is of ranks that have been ended
            self.at = time.time()
            _write(self._watch, self._path, self, self._begun)


def _keep_facts(path: Path, warned: _Warnings) -> None:
    """Have the facts that a diagnosis rests on written to a file: tests replay them."""
    diagnosed = causes.diagnosed

    def kept(job: JobFacts) -> RankDiagnosis:
        stuck = [facts.at - facts.since for facts in job.ranks if facts.state == "running" and facts.at and not facts.works]
        warned.since = max(warned.since, min(stuck, default=0.0))
        if path.with_suffix(".facts").exists():  # of the first diagnosis; later the other ranks have ended
            return diagnosed(job)
        path.with_suffix(".facts").write_text("\n".join(map(to_text, job.ranks)))
        return diagnosed(job)

    vars(watchdog)["diagnosed"] = kept


def _end_later(watch: nbguard.watch_ranks, path: Path, warned: _Warnings, begun: float) -> None:
    """End this rank some time after its diagnosis, when the others have made theirs."""
    until = time.time() + LIMIT
    while not warned.at and time.time() < until:
        time.sleep(0.05)
    if warned.at:
        path.with_suffix(".dump").write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
        world, until = int(os.environ["WORLD_SIZE"]), time.time() + 12
        while time.time() < until and len(list(path.parent.glob(f"{path.name.rpartition('-')[0]}-*.json"))) < world:
            time.sleep(0.05)
        os._exit(0)


def _write(watch: nbguard.watch_ranks, path: Path, warned: _Warnings, begun: float) -> None:
    said = None if watch.diagnosis is None else [asdict(fault) for fault in watch.diagnosis.faults]
    data = {"faults": said, "late": warned.at - (warned.since or begun) if warned.at else None, "texts": warned.texts}
    fresh = path.with_suffix(f".new-{threading.get_ident()}")
    fresh.write_text(json.dumps(data))
    fresh.replace(path.with_suffix(".json"))  # another thread may end this process meanwhile


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_job(name: str, folder: Path, world: int) -> None:
    """Run a job in forks of this process."""
    port = free_port()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            with (folder / f"{name}-{world}-{rank}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            here = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({key: str(value) for key, value in here.items()})
            try:
                rank_main(name, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    until = time.time() + LIMIT + 10
    while pids and time.time() < until:
        done, _ = os.waitpid(-1, os.WNOHANG)
        pids = [pid for pid in pids if pid != done]
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def launched(names: list[str], folder: Path) -> None:
    """Run jobs in a rank that a launcher has started: one in its process, several each in a fork of it."""
    if len(names) == 1:
        rank_main(names[0], folder)
        return
    port = int(os.environ["MASTER_PORT"])
    for number, name in enumerate(names, 1):
        pid = os.fork()
        if pid == 0:
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            os.environ["MASTER_PORT"] = str(10_000 + (port + number) % 20_000)  # below those that systems give out
            with (folder / f"{name}-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                rank_main(name, folder)
            finally:
                os._exit(0)
        until = time.time() + LIMIT + 10
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.time() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def end_with_the_ranks(world: int) -> None:
    """End this launcher when its ranks have: PyTorch's waits for what each returns, also from one that left by `os._exit`."""
    while len(multiprocessing.active_children()) < world:
        time.sleep(0.02)
    for process in multiprocessing.active_children():
        process.join()
    os._exit(0)


def main(arguments: list[str]) -> None:
    if arguments[0] == "rank":
        launched(arguments[2:], Path(arguments[1]))
    elif arguments[0] == "notebook":
        from accelerate import notebook_launcher

        world, port = int(arguments[2]), str(free_port())
        threading.Thread(target=end_with_the_ranks, args=(world,), daemon=True).start()
        notebook_launcher(launched, (arguments[3:], Path(arguments[1])), num_processes=world, use_port=port)
    else:
        folder, world = Path(arguments[0]), int(arguments[1])
        for name in arguments[2:]:
            started = time.time()
            fork_job(name, folder, world)
            print(name, f"{time.time() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
