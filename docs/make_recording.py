"""Recorder of `docs/lite/training.pickle`: the training of `docs/lite/train.py` on a simulated GPU, until that is full.

`python docs/make_recording.py [FOLDER]` writes it, and the names of its blocks next to it. It needs PyTorch and ten seconds.
"""

from __future__ import annotations

import json
import pickle
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import nbguard

_FOLDER = Path(__file__).resolve().parent / "lite"
_SCRIPT = "train.py"
_DEVICE = "256MiB"


def record(folder: Path) -> Path:
    """Run the training, write its snapshot into a folder, and return the file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    simulation = nbguard.simulate(_DEVICE)
    simulation.record()
    code = compile((_FOLDER / _SCRIPT).read_text(encoding="utf-8"), _SCRIPT, "exec")
    with suppress(torch.OutOfMemoryError), simulation:
        exec(code, names)  # noqa: S102 - our own script
    del names["__builtins__"]
    file = folder / "training.pickle"
    nbguard.save_snapshot(file, names, simulation)
    _shorten(file, folder / "training.pickle.nbguard.json")
    return file


def _shorten(file: Path, names: Path) -> None:
    """Leave the lines of the script alone in a snapshot's stacks, and no time of day."""
    snapshot = pickle.loads(file.read_bytes())  # noqa: S301 - our own file
    (events,) = snapshot["device_traces"]
    begun = events[0]["time_us"]
    for event in events:
        event["time_us"] -= begun
    blocks = [block for segment in snapshot["segments"] for block in (segment, *segment["blocks"])]
    for noted in (*events, *blocks):
        noted["frames"] = [frame for frame in noted["frames"] if frame["filename"] == _SCRIPT or frame["name"] == "nbguard"]
    data = pickle.dumps(snapshot, protocol=4)
    file.write_bytes(data)
    sidecar = json.loads(names.read_text(encoding="utf-8")) | {"crc32": zlib.crc32(data)}
    names.write_text(json.dumps(sidecar), encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
