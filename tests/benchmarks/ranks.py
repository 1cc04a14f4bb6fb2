"""What `watch_ranks` costs a step: two ranks on gloo with DistributedDataParallel, with the watch and without it in turns.

    python tests/benchmarks/ranks.py [--rounds 60] [--steps 60] [--fit tabular] [--instructions]

Each step is a forward and a backward pass, the optimizer's step, and one `all_reduce` of the loss from Python: the one call
that the watch notes, as DistributedDataParallel makes its own in C++. `tabular` is the smallest fit that people run on several
processes: 7 embeddings and layers of 200 and 100 with batch norm, as of fastai's tabular models, a batch of 64, Adam. `bare` is
less than anybody fits: three layers, SGD.

Turns come in threes, of which one is watched: it is held against the two others, and these against each other, which tells how
far turns differ that should not. Said are medians over the rounds with their 95 % range, of the processor time of the fit's
thread:

- whole: a new watch for each turn of some steps; its making and its end are said apart.
- calls: single steps in one watch, of which only every third is noted: its neighbours are milliseconds away, so that this tells
  some microseconds even on a machine that others use. What the watch's own thread takes, which the kernel counts, comes to it.

`sharded` is the same network over a table by FSDP2, whose collectives are all made in Python: eight noted calls a step, and
the loss's. With `--instructions` the first rank runs in valgrind (apt-get install valgrind), whose callgrind counts what its
main thread does: from here on only, as to import torch there takes minutes else. It never fails by time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nbguard
from nbguard.training.ranks import watchdog
from tests.benchmarks import callgrind

_WARM = 10
"""Steps of each turn that are not measured: to begin a watch takes what the processor's caches held of the fit."""
_COUNTED = 40
"""Steps of each turn whose instructions are counted."""
_TURNS = 3
"""Turns without the watch, and as many with it, whose instructions are counted."""


class Tabular(torch.nn.Module):
    """A network over columns of a table, with the sizes that fastai gives one over its sample of the census."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(n, size) for n, size in _CATEGORIES)
        self.norm = torch.nn.BatchNorm1d(3)
        widths = (sum(size for _, size in _CATEGORIES) + 3, 200, 100)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(before, after, bias=False), torch.nn.ReLU(), torch.nn.BatchNorm1d(after))
            for before, after in itertools.pairwise(widths)
        ]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(100, 2))

    def forward(self, categories: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        embedded = [embedding(categories[:, at]) for at, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, self.norm(values)], 1))


_CATEGORIES = ((10, 6), (17, 8), (8, 5), (16, 8), (7, 5), (6, 4), (3, 3))
"""Of each column how many, and the size of its embedding."""


def tabular() -> tuple[torch.nn.Module, Sequence[torch.Tensor], Callable[..., torch.optim.Optimizer]]:
    """Return a network over a table, a batch, and its optimizer."""
    return Tabular(), (torch.randint(0, 3, (64, len(_CATEGORIES))), torch.randn(64, 3)), torch.optim.Adam


def bare() -> tuple[torch.nn.Module, Sequence[torch.Tensor], Callable[..., torch.optim.Optimizer]]:
    """Return three layers, a batch, and their optimizer."""
    layers = (torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    return torch.nn.Sequential(*layers), (torch.randn(64, 64),), torch.optim.SGD


def sharded() -> tuple[torch.nn.Module, Sequence[torch.Tensor], Callable[..., torch.optim.Optimizer]]:
    """Return the network over a table with its parameters split over the ranks, a batch, and its optimizer."""
    network, batch, optimizer = tabular()
    mesh = init_device_mesh("cpu", (2,))
    for part in (network.layers[0], network.layers[1], network):
        fully_shard(part, mesh=mesh)
    return network, batch, optimizer


FITS = {"tabular": tabular, "bare": bare, "sharded": sharded}


def fit(name: str) -> Callable[[], None]:
    """Return a step of a fit."""
    torch.manual_seed(0)
    network, batch, kind = FITS[name]()
    model = network if name == "sharded" else torch.nn.parallel.DistributedDataParallel(network)
    optimizer = kind(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(*batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    return step


def thirds(number: int) -> Sequence[int]:
    """Return in which order the three turns of a round are taken; turn 0 is the watched one, and comes first, second, last."""
    return ((0, 1, 2), (1, 0, 2), (1, 2, 0))[number % 3]


def turn(step: Callable[[], None], steps: int) -> float:
    """Return the seconds of processor time of a step."""
    before = time.thread_time()
    for _ in range(steps):
        step()
    return (time.thread_time() - before) / steps


class Turns:
    """The times of turns in threes."""

    def __init__(self) -> None:
        self.times: tuple[list[float], list[float], list[float]] = ([], [], [])

    @property
    def plain(self) -> float:
        """Return the seconds of a step that is not watched."""
        return statistics.median((*self.times[1], *self.times[2]))

    def words(self) -> str:
        """Return how much longer the watched turns take than the others, and those than each other."""
        watched, one, other = self.times
        cost = [2 * a / (b + c) - 1 for a, b, c in zip(watched, one, other, strict=True)]
        null = [b / c - 1 for b, c in zip(one, other, strict=True)]
        return f"{middle(cost)}; two that are not watched differ by {middle(null)}"


def middle(shares: Sequence[float]) -> str:
    """Return the median of shares, with the range that holds the true one in 95 of 100 cases, by ranks."""
    ordered, n = sorted(shares), len(shares)
    reach = 0.98 * n**0.5
    low, high = ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(n / 2 + reach))]
    return f"{statistics.median(shares):+.2%} ({low:+.2%} to {high:+.2%})"


def whole(step: Callable[[], None], rounds: int, steps: int) -> tuple[Turns, float]:
    """Return the times of turns, every third with a watch of its own, and the seconds to begin one and to end it."""
    turns, around = Turns(), []
    for number in range(rounds):
        for kind in thirds(number):
            begun = time.thread_time()
            with nullcontext() if kind else nbguard.watch_ranks():
                unmeasured = _WARM * turn(step, _WARM)
                turns.times[kind].append(turn(step, steps))
            if not kind:
                around.append(time.thread_time() - begun - unmeasured - steps * turns.times[0][-1])
    return turns, statistics.median(around)


def calls(step: Callable[[], None], steps: int) -> tuple[Turns, float]:
    """Return the times of single steps in one watch that notes every third of them, and its thread's share of a core."""
    turns = Turns()
    with nbguard.watch_ranks() as watch:
        hook = watch._hook
        assert hook is not None
        cells = [(cell, noted, plain) for cell, (noted, plain) in hook._cells]
        begun, before = time.perf_counter(), thread_time()
        for number in range(steps):
            for kind in thirds(number):
                for cell, noted, plain in cells:
                    cell.cell_contents = plain if kind else noted
                turns.times[kind].append(turn(step, 1))
        share = (thread_time() - before) / (time.perf_counter() - begun)
        for cell, noted, _ in cells:
            cell.cell_contents = noted
    return turns, share


def thread_time() -> float:
    """Return the seconds of processor time that the watch's thread has used so far."""
    (thread,) = (each for each in threading.enumerate() if each.name == "nbguard-watch-ranks")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def measure(name: str, rounds: int, steps: int, says: bool) -> None:
    """Run the rounds, and say what came out."""
    step = fit(name)
    turn(step, 20)
    turns, around = whole(step, rounds, steps)
    single, share = calls(step, rounds * steps // 3)
    if says:
        print(f"{name}: a step takes {1e3 * turns.plain:.2f} ms of processor time")
        print(f"  whole: watched turns take {turns.words()}")
        print(f"  calls: steps that are noted take {single.words()}")
        print(f"  its thread takes {share:.3%} of a core; to begin and to end a watch takes {1e3 * around:.1f} ms", flush=True)


def counted(name: str) -> None:
    """Run steps with the watch and without it, and have callgrind write what each turn of the first rank took.

    The watch's thread, which goes by the clock, only looks once.
    """
    vars(watchdog)["_EVERY"] = 1e6
    step = fit(name)
    turn(step, _WARM)
    _callgrind("--instr=on")
    for _ in range(_TURNS):
        _callgrind("--dump=between")
        _callgrind("--dump=none")
        turn(step, _COUNTED)
        _callgrind("--dump=plain")
        with nbguard.watch_ranks(timeout=1e7):
            turn(step, _WARM)
            _callgrind("--dump=between")
            turn(step, _COUNTED)
            _callgrind("--dump=watched")


def _callgrind(what: str) -> None:
    if dist.get_rank() == 0:
        callgrind.order(what)


def instructions(name: str) -> tuple[list[float], list[float]]:
    """Return the instructions of a step of the first rank's main thread, without the watch and with it, once for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        rank = [sys.executable, __file__, "--count", name]
        settings = {**os.environ, "TMPDIR": folder, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **_address()}
        other = subprocess.Popen(rank, env={**settings, "RANK": "1"})
        counts: dict[str, list[int]] = {"none": [], "plain": [], "watched": []}
        for label, totals in callgrind.counted(rank, folder, env={**settings, "RANK": "0"}):
            if label in counts:
                counts[label].append(totals[0])
        other.wait()
        none = statistics.median(counts["none"])
        plain, watched = ([(count - none) / _COUNTED for count in counts[which]] for which in ("plain", "watched"))
        return plain, watched


def _address() -> dict[str, str]:
    """Return where the ranks meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def main() -> None:
    """Fork the second rank, and measure in the first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    parser.add_argument("--fit", choices=FITS)
    asked = parser.parse_args()
    names = [asked.fit] if asked.fit else list(FITS)
    if asked.instructions:
        for name in names:
            plain, watched = instructions(name)
            share = statistics.median(watched) / statistics.median(plain) - 1
            each = "; ".join(", ".join(f"{count / 1e6:.3f}" for count in turns) for turns in (plain, watched))
            print(
                f"{name}: million instructions a step, without the watch and with it, in turns: {each}: {share:+.2%}",
                flush=True,
            )
        return
    torch.set_num_threads(1)
    if asked.count:
        dist.init_process_group("gloo")
        counted(asked.count)
        dist.destroy_process_group()
        return
    settings = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **_address()}
    other = os.fork()
    os.environ.update({**settings, "RANK": str(int(other == 0))})
    dist.init_process_group("gloo")
    for name in names:
        measure(name, asked.rounds, asked.steps, says=other != 0)
    dist.destroy_process_group()
    if other:
        os.waitpid(other, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
