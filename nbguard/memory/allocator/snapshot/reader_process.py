"""Large pickles are read by Python's own unpickler, in a process of its own that may neither look up a global nor grow at will.

Python's unpickler is ten times as fast as ours, but a hostile file can make it fill memory, hang or crash: here that ends the
process that reads, and nothing else. The result is checked there and comes back as numbers and texts. (ADR 0016)
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.snapshot.snapshot import (
    Events,
    Sidecar,
    Snapshot,
    SnapshotBlock,
    SnapshotSegment,
    Stacks,
    Trace,
    parse_snapshot,
)
from nbguard.memory.allocator.snapshot.unpickle import DAMAGED, Progress, UnreadablePickle, asks_for, unreadable
from nbguard.plain_data import take_apart

# --- A snapshot as bytes (a line of JSON, then arrays), which the process that reads a large file sends.


_BLOCK = ("address", "size", "requested", "state", "stack")
_SEGMENT = ("device", "address", "total_size", "stream", "is_small", "is_expandable", "pool")


def write_snapshot(snapshot: Snapshot, out: BinaryIO) -> None:
    """Write a snapshot without its sidecar."""
    stacks = snapshot.stacks
    columns = [stacks.numbers, stacks.ends]
    for trace in snapshot.traces:
        columns += _columns(trace)
    segment, block = attrgetter(*_SEGMENT), attrgetter(*_BLOCK)
    head = {
        "segments": [(segment(entry), list(map(block, entry.blocks))) for entry in snapshot.segments],
        "settings": snapshot.settings,
        "divisions": snapshot.divisions,
        "frames": stacks.frames,
        "hints": sorted(snapshot.hints),
        "traces": [(trace.left_out, trace.pools is not None) for trace in snapshot.traces],
        "columns": [(column.typecode, len(column)) for column in columns],
    }
    out.write(json.dumps(head).encode() + b"\n")
    for column in columns:
        column.tofile(out)


def read_snapshot(source: IO[bytes], sidecar: Sidecar) -> Snapshot:
    """Return the snapshot that `write_snapshot` wrote. Raises EOFError if it ends too early."""
    line = source.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    head = json.loads(line)
    columns = iter([_read_column(source, code, count) for code, count in head["columns"]])
    numbers, ends = next(columns), next(columns)
    return Snapshot(
        segments=tuple(_segment(*entry) for entry in head["segments"]),
        traces=tuple(_trace(columns, *entry) for entry in head["traces"]),
        settings=head["settings"],
        divisions=None if head["divisions"] is None else tuple(head["divisions"]),
        stacks=Stacks(tuple(map(tuple, head["frames"])), numbers, ends),
        hints=frozenset(head["hints"]),
        sidecar=sidecar,
    )


def _columns(trace: Trace) -> list[array[int]]:
    """Return a trace as columns: actions, addresses, sizes, streams and stacks of its events, and pools if it has them."""
    assert isinstance(trace.events, Events)
    assert isinstance(trace.stacks, array)
    pools = [] if trace.pools is None else [array("Q", map(itemgetter(at), trace.pools)) for at in range(2)]
    return [*trace.events.columns, trace.stacks, *pools]


def _trace(columns: Any, left_out: int, has_pools: bool) -> Trace:
    events, stacks = Events(*(next(columns) for _ in range(4))), next(columns)
    pools = tuple(zip(next(columns), next(columns), strict=True)) if has_pools else None
    return Trace(events, pools, stacks, left_out)


def _segment(values: list[Any], blocks: list[list[Any]]) -> SnapshotSegment:
    device, address, total_size, stream, is_small, is_expandable, pool = values
    return SnapshotSegment(
        device=device,
        address=address,
        total_size=total_size,
        stream=stream,
        is_small=is_small,
        is_expandable=is_expandable,
        pool=(pool[0], pool[1]),
        blocks=tuple(SnapshotBlock(**dict(zip(_BLOCK, block, strict=True))) for block in blocks),
    )


def _read_column(source: IO[bytes], code: str, count: int) -> array[int]:
    column: array[int] = array(code)
    column.fromfile(source, count)
    return column


_MEMORY = 16
"""Bytes of memory that reading may take for each byte of the file; honest ones take some 8."""
LEAST_MEMORY = 1 << 29
_SPEED = 2 << 20
"""Bytes that are read in a second of processor time at least; honest files some 40 MB."""
LEAST_SECONDS = 20
_PERIOD = 0.1  # seconds between two reports of progress
_READ, _REFUSED = b"+", b"-"
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nbguard.memory.allocator.snapshot import reader_process as r; r.main()"
)
_DAMAGES = (pickle.UnpicklingError, EOFError, struct.error, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of Python's unpickler at a damaged pickle."""


IS_OURS = sys.platform == "emscripten"
"""Whether this whole process is one that may end. In a browser, the page that started it starts another."""


def is_available() -> bool:
    """Return whether this system bounds the memory of a process, and has a Python to start."""
    return sys.platform == "linux" and bool(sys.executable)


def read_pickle(file: BinaryIO, size: int, sidecar: Sidecar, progress: Progress | None = None) -> Snapshot:
    """Return the snapshot in an open file that holds a pickle of `size` bytes and nothing else.

    Raises:
        SnapshotError: the pickle is no snapshot, is damaged, or asks for more than plain data.
        OSError: no process can be started.
    """
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # the process shares this position, which tells how far it is
    folder = str(Path(__file__).parents[4])
    limits = max(LEAST_MEMORY, _MEMORY * size), LEAST_SECONDS + size // _SPEED
    process = subprocess.Popen(  # noqa: S603 - this Python, with code of ours
        [sys.executable, "-I", "-S", "-c", _MAIN, folder, str(size), *map(str, limits)],
        stdin=file,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            if progress is not None:
                progress(0, size)
            answers = process.stdout
            assert answers is not None
            while not select.select([answers], [], [], _PERIOD)[0]:
                if progress is not None:
                    progress(os.lseek(file.fileno(), 0, os.SEEK_CUR), size)
            answer = answers.read(1)
            if answer == _READ:
                snapshot = without_collecting(lambda: read_snapshot(answers, sidecar))
                if progress is not None:
                    progress(size, size)
                return snapshot
            text = answers.read().decode() if answer == _REFUSED else ""
            raise SnapshotError(text or _why_it_died(process.wait()))
        except EOFError:
            raise SnapshotError(_why_it_died(process.wait())) from None
        finally:
            process.kill()


def _why_it_died(status: int) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return "not a readable snapshot: reading it takes far longer than its size explains."
    return DAMAGED


def without_collecting(make: Callable[[], Snapshot]) -> Snapshot:
    """Return the result of `make`, as millions of new tuples would set off garbage collections that find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return make()
    finally:
        if collects:
            gc.enable()


# --- in the process that reads ----------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data; whatever asks for more ends it."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise asks_for(f"{module}.{name}"[:120])

    def persistent_load(self, _pid: Any) -> NoReturn:
        raise asks_for("an object")


def main() -> None:
    """Read a pickle from standard input and write the snapshot, or why it is none, to standard output.

    The arguments are nbguard's folder, the bytes of the pickle, and the bytes of memory and the seconds that reading may take.
    """
    size, memory, seconds = map(int, sys.argv[2:])
    _limit(memory, seconds)
    gc.disable()
    out = sys.stdout.buffer
    try:
        snapshot = read_here(sys.stdin.buffer, size)
    except SnapshotError as error:
        out.write(_REFUSED + str(error).encode())
    else:
        out.write(_READ)
        write_snapshot(snapshot, out)
    out.flush()
    os._exit(0)  # freeing millions of objects one by one would take as long as reading them


def read_here(file: BinaryIO, size: int, sidecar: Sidecar | None = None) -> Snapshot:
    """Return the snapshot in a pickle of `size` bytes, read in this process, which must be one that may hang or crash.

    Raises:
        SnapshotError: the pickle is no snapshot, is damaged, or asks for more than plain data.
    """
    raw = None
    try:
        raw = _PlainUnpickler(file).load()
        return parse_snapshot(raw, size, sidecar, consume=True)
    except UnreadablePickle as bad:
        raise SnapshotError(unreadable(bad)) from None
    except MemoryError:
        raise SnapshotError("not a readable snapshot: it would fill far more memory than its size explains.") from None
    except SnapshotError:
        if IS_OURS:  # another process ends without freeing anything
            take_apart(raw)
        raise
    except _DAMAGES:
        raise SnapshotError(DAMAGED) from None


def _limit(memory: int, seconds: int) -> None:
    """Bound the memory and time of this process, so that a hostile file ends it and nothing else."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
