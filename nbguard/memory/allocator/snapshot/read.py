"""Snapshot files, pickles of `torch.cuda.memory._dump_snapshot` since torch 2.0 or JSON, gzip'd or not, and their sidecars.

A file is not trusted. Reading it runs none of its content, comes to an end, and ends in a `Snapshot` or one `SnapshotError`.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from contextlib import suppress
from dataclasses import fields
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from nbguard.errors import DamagedDataError, SnapshotError
from nbguard.files import open_file, read_file, unreadable
from nbguard.memory.allocator.model.settings import parse_version
from nbguard.memory.allocator.snapshot import reader_process
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, parse_snapshot
from nbguard.memory.allocator.snapshot.unpickle import Progress, unpickle, unpickle_before
from nbguard.plain_data import NESTED, from_plain, read_json, take_apart, to_plain
from nbguard.units import format_bytes

# --- The sidecar of a snapshot, `FILE.nbguard.json`: facts that a replay needs and PyTorch's format has no place for.


_SUFFIX = ".nbguard.json"
LARGEST_SIDECAR = 1 << 20
"""Bytes of a sidecar; a larger one is refused."""
_LONGEST_VERSION = 100
"""Characters of a version of PyTorch."""


def sidecar_path(path: str | Path) -> Path:
    """Return the path of the sidecar of the snapshot at `path`."""
    path = Path(path)
    return path.with_name(path.name + _SUFFIX)


def sidecar_data(sidecar: Sidecar) -> dict[str, Any]:
    """Return the content of a sidecar file as JSON-ready data; a writer may add other keys."""
    data: dict[str, Any] = {"nbguard": 1} | to_plain(sidecar)
    return data


def read_sidecar(path: str | Path) -> Sidecar:
    """Return the sidecar of the snapshot at `path`, empty where there is no such file.

    Raises:
        SnapshotError: the sidecar is damaged.
    """
    place = sidecar_path(path)
    try:
        raw = read_json(read_file(place, LARGEST_SIDECAR))
        if not isinstance(raw, dict) or raw.get("nbguard") != 1:
            raise ValueError("not ours")
        known = {field.name: raw[field.name] for field in fields(Sidecar) if field.name in raw}
        sidecar: Sidecar = from_plain(Sidecar, known)
        version = sidecar.torch_version
        if version is not None and (len(version) > _LONGEST_VERSION or not parse_version(version)):
            raise ValueError("torch_version")
        return sidecar
    except FileNotFoundError:
        return Sidecar()
    except (OSError, ValueError):
        raise SnapshotError(f"{place.name} next to it is damaged; remove it to read the snapshot without it.") from None


MAX_BYTES = 4 * 1024**3
"""A larger file, or one that unpacks to more, is refused."""

LARGE = 1 << 20
"""Least size in bytes of a pickle that is read in a separate process, which starts in some 0.1 s."""

_PICKLED = b"\x80(]}"
"""First bytes of pickles whose object is a dict or a list, of all protocols."""

_CHUNK = 1 << 24
"""Bytes that are read at once."""

_PLAIN = 1 << 26
"""Least bytes of content whose density is checked."""

_DENSEST = 250
"""Content of more than `_PLAIN` bytes that is so many times its packed size is made to fill memory: snapshots reach some 60."""

_LONGEST_NUMBER = 24
"""Digits of an integer in JSON."""

_BYTES_PER_CONTAINER = 8
"""Fewer than this on the average are no content, and would fill many times the size of the file."""


def load_snapshot(path: str | Path, progress: Progress | None = None, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Return the snapshot in a file, with the facts of its sidecar (`FILE.nbguard.json`).

    Args:
        path: a pickle or JSON file, gzip'd or not: a whole snapshot, or the list of segments alone.
        progress: called now and then with (bytes done, bytes in all).
        max_bytes: the largest content that is read.

    Raises:
        SnapshotError: the file cannot be read, is damaged, or is no snapshot.
    """
    path = Path(path)
    try:
        with _content(path, max_bytes) as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(0)
            return _read(content, size, read_sidecar(path), progress)
    except SnapshotError as error:
        raise SnapshotError(f"{path.name or path}: {error}") from None
    except OSError as error:
        raise SnapshotError(unreadable(path, error)) from None
    except MemoryError:
        raise SnapshotError(f"{path.name}: there is not enough memory to read it.") from None


_HEAD = 1 << 26
"""The first bytes of a file, which are searched for segments. Some ten thousand blocks take 10 MB."""


def read_segments(path: str | Path, least: int) -> Snapshot | None:
    """Return the snapshot in a pickle without its history, which follows the segments, so that it takes only a moment.

    None for a file of fewer than `least` bytes, one in another order or form, and one that cannot be read.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = unpickle_before(file.read(_HEAD), "device_traces") if size >= least else None
        return None if raw is None else parse_snapshot(raw, _HEAD)
    except (OSError, SnapshotError):
        return None


def _content(path: Path, max_bytes: int) -> BinaryIO:
    """Return a file with the content, unpacked if it is packed."""
    try:
        open_file(path).close()  # a folder or a device is none to read
        size = path.stat().st_size
        if size > max_bytes:
            raise SnapshotError(f"more than {format_bytes(max_bytes)} are not read.")
        with path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return path.open("rb")
        return _unpacked(path, max(_PLAIN, _DENSEST * size), max_bytes)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, SnapshotError) or (isinstance(error, OSError) and error.strerror):
            raise
        raise SnapshotError("it is packed by gzip, and damaged.") from None


def _unpacked(path: Path, densest: int, max_bytes: int) -> BinaryIO:
    """Return a temporary file with the unpacked content of a gzip'd file, at most so many bytes."""
    content = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with gzip.open(path) as packed:
            while part := packed.read(_CHUNK):
                if content.tell() + len(part) > densest:
                    raise SnapshotError(f"it unpacks to more than {_DENSEST} times its size, as no snapshot does.")
                if content.tell() + len(part) > max_bytes:
                    raise SnapshotError(f"it unpacks to more than {format_bytes(max_bytes)}, which are not read.")
                content.write(part)
        content.flush()
    except BaseException:
        content.close()
        raise
    return content


def _read(content: BinaryIO, size: int, sidecar: Sidecar, progress: Progress | None) -> Snapshot:
    if size >= LARGE and content.read(1) == b"\x80":
        if reader_process.IS_OURS:
            content.seek(0)
            return reader_process.without_collecting(lambda: reader_process.read_here(content, size, sidecar))
        if reader_process.is_available():
            with suppress(OSError):  # no process can be started: it is read here, if slowly
                return reader_process.read_pickle(content, size, sidecar, progress)
    content.seek(0)
    raw = _decode(content.read(), progress)
    try:
        return parse_snapshot(raw, size, sidecar, consume=True)
    except SnapshotError:
        take_apart(raw)
        raise


def _decode(data: bytes, progress: Progress | None) -> Any:
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if not start:
        raise SnapshotError("the file is empty.")
    if start in (b"{", b"["):
        raw = _read_json(data)
        if progress is not None:
            progress(len(data), len(data))
        return raw
    if start == b"<":
        raise SnapshotError("this is a web page; give the snapshot that it was made from.")
    if data[:4] == b"PK\x03\x04":
        raise SnapshotError(
            "this is a zip archive, as torch.save writes; a snapshot comes from torch.cuda.memory._dump_snapshot."
        )
    if data[:1] not in _PICKLED:
        raise SnapshotError(
            "not a readable snapshot: it is neither a pickle nor JSON; torch.cuda.memory._dump_snapshot(FILE) writes one."
        )
    return unpickle(data, progress)


def _read_json(data: bytes) -> Any:
    if data.count(b"[") + data.count(b"{") > len(data) // _BYTES_PER_CONTAINER + 1000:
        raise SnapshotError("not a readable snapshot: the JSON is made of empty containers.")
    try:
        return read_json(data, parse_int=_integer, parse_constant=_no_number)
    except DamagedDataError:
        raise SnapshotError(f"not a readable snapshot: {NESTED}.") from None
    except ValueError as error:
        where = f" at character {error.pos}" if isinstance(error, JSONDecodeError) else ""
        raise SnapshotError(f"not a readable snapshot: the JSON is damaged or ends too early{where}.") from None


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError("too long")
    return int(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
