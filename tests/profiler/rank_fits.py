"""Fits of two ranks on CPU, each rank a process of its own: `python -m tests.profiler.rank_fits FOLDER NAME…`.

The processes are forked from one that has imported torch and fastai: the ranks then start at once. Rank 0 writes its report
to FOLDER/NAME.json, as pure data; what a rank prints goes to FOLDER/NAME-RANK.log.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.ranks import rank_report
from nbguard.training.profiler.analysis.report import RankRow
from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.phase_log import PhaseLog
from nbguard.training.profiler.instruments.rank_watch import RankWatch, pulse_of
from nbguard.training.profiler.record.learner_loop import LearnerLoop
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop
from nbguard.training.ranks.job_board import open_board
from nbguard.training.ranks.rank import current_rank
from nbguard.training.ranks.rank_file import job_folder

WORLD = 2
WORLDS = {"sharded": 4}  # of fits with more ranks
BATCHES = 10
OTHER_RANK = 1
WAIT = 2.0  # seconds that rank 0 waits for the other
CHECKED = ("agrees", "drifts")  # fits whose ranks' models are compared
ASLEEP = ("hangs", "alone")  # fits in which nobody works for long

Fit = Callable[[int], None]


def medians(marks: PhaseLog) -> dict[str, int]:
    """Return the median time per batch of each phase, and of all as "step": the batches but the first two."""
    starts = [boundary.at for boundary in marks.boundaries if boundary.kind == "batch"]
    batches: list[dict[str, int]] = []
    for low, high in pairwise(starts[2:]):
        times: dict[str, int] = dict.fromkeys(("step", *phases.STEP_PHASES), 0)
        for index in range(low, high):
            took = marks.times[index] - marks.times[index - 1]
            label = marks.labels[marks.codes[index]]
            times["step"] += took
            times[label] = times.get(label, 0) + took
        batches.append(times)
    batches = [times for times in batches if times[phases.BACKWARD]] or batches  # without those of the validation
    names = {name for times in batches for name in times}
    return {name: sorted(times.get(name, 0) for times in batches)[len(batches) // 2] for name in names}


def watched(fit: Fit, rank: int, folder: Path, name: str) -> None:
    """Run a fit as a profile does, and write the report of rank 0."""
    recorder = Recorder()
    loop = TorchLoop(recorder)
    parts = [loop, LearnerLoop(recorder, loop)]
    watch = RankWatch(
        10 * WAIT if name in ("sharded", "meshed") else WAIT, patience=1.0, check_ranks=2 if name in CHECKED else 0
    )
    for part in parts:
        part.start()
    watch.start(recorder)
    state = "complete"
    failed: RuntimeError | None = None
    try:
        fit(rank)
    except RuntimeError as error:
        failed = error
        state = f"error: {type(error).__name__}"
    watch.ended(failed)
    marks = recorder.stop()
    for part in parts:
        part.stop()
    watch.stop()
    figures = medians(marks)
    started = time.monotonic()
    seen = watch.exchange(
        RankRow(
            rank=-1,
            host="",
            pid=0,
            state=state,
            batches=recorder.batches,
            step=figures.get("step"),
            wait=figures.get(phases.WAIT),
            backward=figures.get(phases.BACKWARD),
            peak=(1 + 2 * rank) << 30,
        )
    )
    (folder / f"{name}-{rank}.seconds").write_text(str(time.monotonic() - started))
    assert (seen is None) == (rank != 0)
    if seen is not None:
        report = rank_report(seen)
        (folder / f"{name}.json").write_text(json.dumps(asdict(report)))


class Slow(torch.utils.data.Dataset[Any]):
    """Data that takes `seconds` per batch."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds / 4)
        return torch.full((8,), float(index)), torch.ones(1)


def plain(
    rank: int, seconds: float = 0.0, before_backward: Callable[[int], None] = lambda batch: None, timeout: int = 60
) -> None:
    """A loop of PyTorch's own, with DistributedDataParallel."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss_function = torch.nn.MSELoss()
    for batch, (x, y) in enumerate(torch.utils.data.DataLoader(Slow(seconds), batch_size=4), 1):
        loss = loss_function(model(x), y)
        before_backward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def straggler(rank: int) -> None:
    """Rank 1 needs 20 ms more for the data of a batch."""
    plain(rank, 0.020 * (rank == OTHER_RANK))
    dist.destroy_process_group()  # before the end of the fit: what ranks tell goes through the folder


def straggler_again(rank: int) -> None:
    """The straggler, in a process group that stays for another fit."""
    plain(rank, 0.020 * (rank == OTHER_RANK))


class Net(torch.nn.Module):
    """A model with what may differ by design, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.head = torch.nn.Dropout(), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.drop(self.norm(self.body(x))))


def agrees(rank: int, spoil: Callable[[int, Net], None] = lambda step, net: None, seed: int = 0) -> None:
    """Ranks whose data is divided, and whose models are the same but for what differs by design."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    net = Net()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: Any = torch.utils.data.DistributedSampler(Slow(), seed=seed)
    for step, (x, y) in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=2, sampler=sampler), 1):
        torch.nn.functional.mse_loss(model(x), y).backward()
        spoil(step, net)
        optimizer.step()
        optimizer.zero_grad()


def drifts(rank: int) -> None:
    """Rank 1 changes a bias of its own before the fifth step, and shuffles by another seed."""

    def spoil(step: int, net: Net) -> None:
        if rank and step == 5:
            with torch.no_grad():
                net.head.bias += 1

    agrees(rank, spoil, seed=rank)


def sharded(rank: int, apply: str = "fully_shard(model)") -> None:
    """A loop under FSDP, two ranks on each host by its name; `apply` makes `model` a model of shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    socket.gethostname = lambda: f"host{rank // 2}"
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    exec(apply, {"model": model, "fully_shard": fully_shard, "init_device_mesh": init_device_mesh})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for x, _ in torch.utils.data.DataLoader(Slow(), batch_size=4):
        loss = model(x + rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item():.4f}")


def meshed(rank: int, folder: Path) -> None:
    """The same as rank 0's report of it advises."""
    dist.barrier()
    report = json.loads((folder / "sharded.json").read_text())
    (change,) = (each["change"] for each in report["findings"] if "of shards go" in each["what"])
    exec(change.split("`")[3], {})
    watched(partial(sharded, apply=change.split("`")[1]), rank, folder, "meshed")


def killed(rank: int) -> None:
    """Rank 1 is killed in batch 5, once its loss is there."""
    plain(rank, before_backward=lambda batch: os.kill(os.getpid(), signal.SIGKILL) if rank and batch == 5 else None)


def hangs(rank: int) -> None:
    """Rank 1 sleeps in batch 5 before its backward pass; the other one gives up."""
    plain(rank, before_backward=lambda batch: time.sleep(60) if rank and batch == 5 else None, timeout=2)


def alone(rank: int) -> None:
    """Rank 1 does not take part."""
    torch.nn.Linear(8, 1)(torch.ones(1, 8))


def folderless(rank: int) -> None:
    """The folder is not to be trusted, since others may look into it: there is the store alone."""
    with suppress(PermissionError):  # the other rank was first
        job_folder().chmod(0o755)
    plain(rank)


def frozen(rank: int) -> None:
    """Rank 0, which has the store, is stopped by the system while rank 1 tells it how its fit went; see `main`."""
    plain(rank)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        first = first_process()
        while first.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)


@cache
def first_process() -> psutil.Process:
    """Return the process of rank 0, as rank 1 finds it in its sign of life."""
    rank = current_rank()
    assert rank is not None
    board = open_board(rank)
    pulse = pulse_of(board, 0, 1)
    board.release()
    assert pulse is not None
    return psutil.Process(pulse.pid)


def uneven(rank: int) -> None:
    """Two fits at once, of different lengths, that meet in their first batch only: then both have shown signs of life."""
    dist.init_process_group("gloo")
    for batch, _ in zip(range(BATCHES - 3 * rank), torch.utils.data.DataLoader(Slow(), batch_size=4), strict=False):
        if batch == 0:
            dist.barrier()


def fastai(rank: int) -> None:
    """A Learner under `distrib_ctx`, which accelerate sets up and takes down."""
    from fastai.basics import DataLoaders, Learner
    from fastai.distributed import DistributedDL

    DistributedDL._broadcast = _broadcast
    loaders = DataLoaders.from_dsets(Slow(), Slow(), bs=2, num_workers=0, device=torch.device("cpu"))
    learn = Learner(loaders, torch.nn.Linear(8, 1), loss_func=torch.nn.MSELoss())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(cpu=True):
        learn.fit(1)


def accelerated(rank: int) -> None:
    """A loop in which accelerate has wrapped what there is."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def _broadcast(loader: Any, numbers: list[int], rank: int) -> Any:
    """Stand in for fastai's own, which takes them to a GPU, there or not."""
    tensor = torch.tensor(numbers)
    dist.broadcast(tensor, rank)
    return tensor.tolist()


def main(rank: int, folder: Path, name: str) -> None:
    """Run one rank of the fit of this name."""
    torch.set_num_threads(1)
    if name == "alone" and rank:
        alone(rank)
    elif name == "profiled":
        with profile_fit(logs=(f"csv:{folder / name}.csv",)):
            straggler_again(rank)
    elif name == "sharded":
        watched(sharded, rank, folder, name)
        meshed(rank, folder)
    elif name == "twice":
        watched(straggler_again, rank, folder, "first")
        watched(plain, rank, folder, "twice")
    else:
        watched(globals()[name], rank, folder, name)
    if name == "frozen" and rank:
        first_process().resume()


def _environment(rank: int, port: int, world: str) -> Iterator[tuple[str, str]]:
    yield from (("RANK", str(rank)), ("LOCAL_RANK", str(rank)), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world))
    yield from (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("GLOO_SOCKET_IFNAME", "lo"))
    yield "NCCL_DEBUG", "INFO" if rank else "WARN"


def _fork(rank: int, port: int, folder: Path, name: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(rank, port, str(WORLDS.get(name, WORLD))))
        main(rank, folder, name)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(folder: Path, name: str) -> list[int]:
    """Start the ranks of a fit and return their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_fork(rank, port, folder, name) for rank in range(WORLDS.get(name, WORLD))]


def wait(pids: list[int]) -> None:
    """Wait for the end of rank 0; the others, which may hang, are ended with it."""
    os.waitpid(pids[0], 0)
    time.sleep(0.2)
    for pid in pids[1:]:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_all(folder: Path, names: list[str]) -> None:
    """Run these fits one after the other, but those that only sleep beside the others.

    What the ranks would import each by itself is imported before: half of a rank's time.
    """
    for name in ("torch._dynamo", "fastai.basics", "fastai.distributed", "torch.distributed.fsdp"):
        with suppress(ImportError):  # no accelerate
            importlib.import_module(name)
    asleep = [launch(folder, name) for name in names if name in ASLEEP]
    for name in names:
        if name not in ASLEEP:
            wait(launch(folder, name))
    for pids in asleep:
        wait(pids)


if __name__ == "__main__":
    if "RANK" in os.environ:  # of a launcher
        main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2])
        sys.stdout.flush()
        os._exit(0)  # torch's own threads abort an interpreter that ends, now and then
    else:
        run_all(Path(sys.argv[1]), sys.argv[2:])
