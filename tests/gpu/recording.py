"""A recording: what one process did to a GPU's memory, in one small file that names no machine and no person.

The file is gzip'd JSON. Snapshot and trace are torch's own, with three changes: a stack stands once in `stacks` and is
referred to by its number, empty fields are left out, and times count from the first event.
"""

from __future__ import annotations

import getpass
import gzip
import json
import re
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

SCHEMA = 1
SUFFIX = ".json.gz"
LARGEST_FILE = 300_000
LARGEST_SET = 3_000_000

_EMPTY: tuple[Any, ...] = ("", "N/A", [], None)
_ANYBODY = {"root", "user", "ubuntu", "localhost", "torch", "cuda", "gpu", "python", "train"}
"""Names of users and hosts that say nothing, and that frames may contain for other reasons."""

Json = dict[str, Any]


def packed(snapshot: Json) -> Json:
    """Return `torch.cuda.memory._snapshot()` in the form that is stored."""
    stacks: dict[tuple[tuple[str, int, str], ...], int] = {}
    traces = snapshot["device_traces"]
    first = min((event["time_us"] for trace in traces for event in trace), default=0)
    return {
        "allocator_settings": snapshot.get("allocator_settings", {}),
        "segments": [
            _slim(segment, stacks) | {"blocks": [_slim(block, stacks) for block in segment["blocks"]]}
            for segment in snapshot["segments"]
        ],
        "device_traces": [
            [_slim(event, stacks) | {"time_us": event["time_us"] - first} for event in trace] for trace in traces
        ],
        "stacks": [list(map(list, stack)) for stack in stacks],
    }


def _slim(entry: Json, stacks: dict[tuple[tuple[str, int, str], ...], int]) -> Json:
    stack = tuple((portable(frame["filename"]), frame["line"], frame["name"]) for frame in entry.get("frames", ()))
    slim = {key: value for key, value in entry.items() if key not in ("frames", "history") and value not in _EMPTY}
    return slim | ({"stack": stacks.setdefault(stack, len(stacks))} if stack else {})


def portable(filename: str) -> str:
    """Return a frame's file name without what is particular to a machine: after site-packages/, else the base name."""
    _, found, after = filename.rpartition("site-packages/")
    return after if found else PurePosixPath(filename).name


def unpacked(recording: Json) -> Json:
    """Return segments and traces of a recording as `torch.cuda.memory._snapshot()` gave them, with frames."""
    stacks = [[dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in stack] for stack in recording["stacks"]]

    def full(entry: Json) -> Json:
        return {key: value for key, value in entry.items() if key != "stack"} | {
            "frames": stacks[entry["stack"]] if "stack" in entry else []
        }

    return {
        "segments": [
            full(segment) | {"blocks": [full(block) for block in segment["blocks"]]} for segment in recording["segments"]
        ],
        "device_traces": [[full(event) for event in trace] for trace in recording["device_traces"]],
    }


def dump(recording: Json, path: Path) -> int:
    """Write a recording and return its size in bytes. Raises AssertionError if it names a machine or is too large."""
    text = json.dumps(recording, separators=(",", ":"))
    assert not (found := traces_of_a_machine(text)), f"the recording names {found}"
    data = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    assert len(data) <= LARGEST_FILE, f"{len(data)} bytes: record less work"
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)  # whole or not at all, whenever this process is ended
    return len(data)


def traces_of_a_machine(text: str) -> list[str]:
    """Return what in `text` belongs to this machine or its user: absolute paths, folders, names."""
    names = {getpass.getuser(), socket.gethostname(), socket.gethostname().partition(".")[0]} - _ANYBODY
    found = [name for name in names if len(name) > 2 and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    found += [folder for folder in {str(Path.home()), str(Path.cwd())} if len(folder) > 1 and folder in text]
    return found + re.findall(r'"/[^"]*', text)


def load_all(place: Path) -> Iterator[tuple[str, Json]]:
    """Yield (name, recording) of each recording in a folder, or in the bundle of a GPU day."""
    if place.is_dir():
        for path in sorted(place.glob(f"*{SUFFIX}")):
            yield path.name.removesuffix(SUFFIX), json.loads(gzip.decompress(path.read_bytes()))
        return
    with tarfile.open(place) as bundle:
        for member in sorted(bundle.getmembers(), key=lambda member: member.name):
            file = bundle.extractfile(member) if member.name.endswith(SUFFIX) else None
            if file is not None:
                yield PurePosixPath(member.name).name.removesuffix(SUFFIX), json.loads(gzip.decompress(file.read()))
