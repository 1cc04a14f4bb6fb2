"""What `watch_ranks` costs a step: two ranks on gloo with DistributedDataParallel, with the watch and without it in turns.

    python tests/benchmarks/ranks.py [--rounds 40] [--steps 100]

Each step is a forward and a backward pass, the optimizer's step, and one `all_reduce` of the loss from Python, which the watch
notes. Said are, per step and as shares of it: processor time of the thread of the fit, as medians over the rounds, and of the
quicker quarter of them, where others use the machine; instructions where the system counts them; and calls of
Python functions, on the thread of the fit, by `sys.setprofile`. On a machine that others use, pairs of turns differ by more
than the watch costs; so its parts are timed by themselves, too: the note of one call, and the processor time that its thread
takes, which the kernel counts. One watch per round: its making and its end are said apart. It never fails by time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbguard

WIDTHS = (256, 1024)
"""Of the model's layers: steps of some 3 ms and some 20 ms."""
_WARM = 10
"""Steps of each turn that are not measured."""
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


class Instructions:
    """The instructions that this process has retired, by the system's counter; None where there is none."""

    def __init__(self) -> None:
        attributes = bytearray(128)
        inherit, no_kernel = 1 << 1, (1 << 5) | (1 << 6)
        struct.pack_into("<IIQQQQQ", attributes, 0, 0, 128, 1, 0, 0, 0, inherit | no_kernel)
        number = _PERF_EVENT_OPEN.get(platform.machine())
        self._fd = -1
        if number is not None:
            buffer = (ctypes.c_char * 128).from_buffer(attributes)
            self._fd = ctypes.CDLL(None, use_errno=True).syscall(number, buffer, 0, -1, -1, 0)

    def read(self) -> int | None:
        """Return how many there have been."""
        return struct.unpack("<Q", os.read(self._fd, 8))[0] if self._fd >= 0 else None


def fit(width: int) -> Callable[[], None]:
    """Return a step of a fit."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 8)
    )
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    return step


def calls_of(step: Callable[[], None]) -> int:
    """Return how many functions a step calls, Python's and C's."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def note_cost(watch: nbguard.watch_ranks, calls: int = 5000) -> float:
    """Return the seconds that the watch takes to note one call: of one that does nothing, with the hook and without it."""
    hook, tensor = watch._hook, torch.zeros(())
    assert hook is not None
    hook.remove()
    wrapper: Any = dist.all_reduce
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    function = cell.cell_contents
    cell.cell_contents = _nothing
    plain = _quickest(dist.all_reduce, tensor, calls)
    hook.install()
    noted = _quickest(dist.all_reduce, tensor, calls)
    hook.remove()
    cell.cell_contents = function
    hook.install()
    return noted - plain


def _nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    """Stand for a collective: it has the arguments of `all_reduce`."""


def _quickest(call: Callable[[Any], Any], tensor: Any, calls: int) -> float:
    """Return the seconds of one call, of the quickest of nine series."""
    times = []
    for _ in range(9):
        before = time.thread_time()
        for _ in range(calls):
            call(tensor)
        times.append((time.thread_time() - before) / calls)
    return min(times)


def thread_time() -> float:
    """Return the seconds of processor time that the watch's thread has used so far."""
    (thread,) = (each for each in threading.enumerate() if each.name == "nbguard-watch-ranks")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def own_cost(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return (seconds to note one call, share of the wall time that the watch's thread works) while a fit goes on."""
    with nbguard.watch_ranks() as watch:
        step()
        begun, before = time.perf_counter(), thread_time()
        for _ in range(steps):
            step()
        share = (thread_time() - before) / (time.perf_counter() - begun)
        return note_cost(watch), share


def quick(times: list[float]) -> float:
    """Return the lower quartile of times."""
    return statistics.quantiles(times, n=4)[0]


def measure(width: int, rounds: int, steps: int, says: bool) -> None:
    """Run the rounds, and say what came out."""
    step, counter = fit(width), Instructions()
    for _ in range(20):
        step()
    times: dict[bool, list[float]] = {False: [], True: []}
    instructions: dict[bool, list[float]] = {False: [], True: []}
    calls: dict[bool, int] = {}
    around: list[float] = []
    for number in range(2 * rounds):
        is_watched = number % 2 == (number // 2) % 2  # both orders by turns
        begun = time.thread_time()
        watch = nbguard.watch_ranks() if is_watched else nullcontext()
        with watch:
            before = time.thread_time()
            for _ in range(_WARM):  # to begin a watch takes what the processor's caches held of the fit
                step()
            unmeasured = time.thread_time() - before
            before, counted = time.thread_time(), counter.read()
            for _ in range(steps):
                step()
            took, counts = time.thread_time() - before, counter.read()
            if number >= 2 * rounds - 2:
                calls[is_watched] = calls_of(step)
        if is_watched:
            around.append(time.thread_time() - begun - took - unmeasured)
        times[is_watched].append(took / steps)
        if counts is not None and counted is not None:
            instructions[is_watched].append((counts - counted) / steps)
    note, thread = own_cost(step, 10 * steps)
    if not says:
        return
    plain, watched = statistics.median(times[False]), statistics.median(times[True])
    share = statistics.median(b / a - 1 for a, b in zip(times[False], times[True], strict=True))
    print(f"width {width}: a step takes {1e3 * plain:.2f} ms of processor time, watched {1e3 * watched:.2f} ms")
    print(
        f"  in turns {share:+.2%} (median of {rounds}), the quicker quarter {quick(times[True]) / quick(times[False]) - 1:+.2%}"
    )
    if instructions[True]:
        plain, watched = (statistics.median(instructions[each]) for each in (False, True))
        print(f"  instructions {plain / 1e6:.2f} M, watched {watched / plain - 1:+.2%}")
    else:
        print("  instructions: this system counts none")
    print(f"  functions called {calls[False]}, watched {calls[True]}")
    print(f"  its parts: {1e6 * note:.1f} µs to note a call, its thread {thread:.3%} of a core: together")
    print(f"  {note / statistics.median(times[False]) + thread:.2%} of this step with one call of Python's")
    print(f"  to begin and to end the watch: {1e3 * statistics.median(around):.1f} ms")


def main() -> None:
    """Fork the second rank, and measure in the first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = os.fork()
    here = {"RANK": int(other == 0), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for width in WIDTHS:
        measure(width, asked.rounds, asked.steps * WIDTHS[0] // width, says=other != 0)
    dist.destroy_process_group()
    if other:
        os.waitpid(other, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
