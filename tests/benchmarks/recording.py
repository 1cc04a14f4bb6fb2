"""What `%gpumem record on` costs: per allocation, in memory, and when a snapshot is taken.

    python tests/benchmarks/recording.py                       # on a GPU
    python -m tests.fake_cuda python tests/benchmarks/recording.py    # on the fake device

Allocates and frees 1 MiB over and over, below 10 and below 60 Python frames, with recording off and on in turns: an allocation
with its free makes three entries. Prints the median processor time of this process and the growth of its memory; on the fake
device the driver costs next to nothing, so that the shares are not those of a GPU. It never fails by time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from nbguard.memory.cleanup.apply.allocator_history import start, stop
from nbguard.memory.core.recording import DEFAULT_ENTRIES

_ROUNDS, _TIMES = 9, 20_000


def below(depth: int) -> float:
    """Return the processor time, in seconds, of one allocation with its free below so many more frames."""
    if depth:
        return below(depth - 1)
    begin = time.process_time()
    for _ in range(_TIMES):
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    return (time.process_time() - begin) / _TIMES


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Print the cost."""
    if not torch.cuda.is_available():
        print("  recording: no CUDA device here (python -m tests.fake_cuda python tests/benchmarks/recording.py)")
        return
    print(f"  {torch.cuda.get_device_name()}, {_ROUNDS} rounds of {_TIMES:,} allocations of 1 MiB, each with its free")
    for depth in (10, 60):
        off, on, grown = [], [], 0
        below(depth)
        for number in range(_ROUNDS):
            off.append(below(depth))
            before = resident()
            start()
            on.append(below(depth))
            below(depth)  # the buffer is full after it
            grown = grown or resident() - before
            if number < _ROUNDS - 1:
                stop()
        extra = statistics.median(on) - statistics.median(off)
        print(
            f"  below {depth} frames   off {statistics.median(off) * 1e6:6.2f} µs   on {statistics.median(on) * 1e6:6.2f} µs   "
            f"recording {extra * 1e6:5.2f} µs each   a full buffer {grown / DEFAULT_ENTRIES:4.0f} bytes an entry"
        )
        begin = time.process_time()
        entries = len(torch.cuda.memory._snapshot()["device_traces"][0])
        print(f"  a snapshot of {entries:,} entries takes {time.process_time() - begin:.2f} s")
        stop()


if __name__ == "__main__":
    main()
