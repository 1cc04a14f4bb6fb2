"""The pace at which storage gives the files of a loader, by direct reads, past the page cache. Linux only."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nbguard.training.profiler.analysis.loader.slowest import StoragePace

_MOST = 4096
"""Files that are noted."""
_CODE = (".py", ".pyc", ".so")
"""Files that imports open."""
_PIECE = 2**20
"""Bytes of one read; each thread has one on its way."""


class OpenedFiles:
    """The regular files that this process has opened for reading since it was made.

    An audit hook cannot be taken off: make it only in a process that is about to end.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or len(self._paths) >= _MOST:
            return
        path, _, flags = arguments
        if type(path) is str and type(flags) is int and flags & os.O_ACCMODE == os.O_RDONLY and not path.endswith(_CODE):
            self._paths[path] = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that can still be read, in the order of their opening."""
        return tuple(path for path in [*self._paths] if Path(path).is_file())


def storage_pace(paths: Sequence[str], readers: int, seconds: float = 1.0) -> StoragePace | None:
    """Return the pace of direct reads of files, each at most once, or None where the system or the file system has none.

    Args:
        paths: of regular files.
        readers: threads that read at the same time.
        seconds: no further piece is read after that time.
    """
    if not hasattr(os, "O_DIRECT") or not paths:
        return None
    todo = iter(paths)
    began = time.perf_counter_ns()
    end = began + round(seconds * 1e9)
    with ThreadPoolExecutor(readers) as pool:
        read = [*pool.map(lambda _: _read(todo, end), range(readers))]
    nbytes, files = (sum(column) for column in zip(*read, strict=True))
    if not nbytes:
        return None
    elapsed = time.perf_counter_ns() - began
    return StoragePace(per_second=nbytes / elapsed * 1e9, nbytes=nbytes, files=files, readers=readers)


def _read(todo: Iterator[str], end: int) -> tuple[int, int]:
    """Return the bytes and files that one thread has read."""
    nbytes = files = 0
    with mmap.mmap(-1, _PIECE) as piece:  # direct reads need memory that begins with a page
        for path in todo:
            got = _read_file(path, piece, end)
            nbytes, files = nbytes + got, files + bool(got)
            if time.perf_counter_ns() > end:
                break
    return nbytes, files


def _read_file(path: str, piece: mmap.mmap, end: int) -> int:
    """Return the bytes of a file that were read, 0 where it cannot be read past the page cache."""
    nbytes = 0
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            while got := os.readv(file, [piece]):
                nbytes += got
                if got < _PIECE or time.perf_counter_ns() > end:
                    break
        finally:
            os.close(file)
    return nbytes
