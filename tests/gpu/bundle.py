"""What a GPU day leaves: one archive with everything, and from there the recordings and figures into their places."""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path

from tests.gpu import replay
from tests.gpu.child import ROOT
from tests.gpu.recording import SUFFIX, load_all
from tests.gpu.section import NOT_MEASURED, placed

ARCHIVE = "gpu-day.tar.gz"
_LOOSE = ("log.txt", "section.md", "bench.json")
"""Beside the archive, for whoever wants to read without unpacking."""


def bundle(work: Path, out: Path) -> None:
    """Write all files of `work` into one archive in `out`, and some beside it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in _LOOSE:
        (out / name).unlink(missing_ok=True)
        if (work / name).exists():
            shutil.copyfile(work / name, out / name)
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for path in sorted(work.rglob("*")):
            archive.add(path, path.relative_to(work), recursive=False, filter=_nobodys)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def adopt(place: Path, root: Path = ROOT) -> int:
    """Put the recordings of a bundle into tests/data/gpu and its section into docs/benchmarks.md; return the exit status."""
    archive = place / ARCHIVE if place.is_dir() else place
    if not archive.is_file():
        print(f"gpu-day: no {ARCHIVE} at {place}", file=sys.stderr)
        return 2
    with tarfile.open(archive) as found:
        files = {member.name: file.read() for member in found if (file := found.extractfile(member)) is not None}
    section = files.get("section.md", b"").decode()
    recordings = dict(load_all(archive))
    if not section or NOT_MEASURED in section or any(recording["dry"] for recording in recordings.values()):
        print("gpu-day: that run was dry or did not end: nothing is taken over", file=sys.stderr)
        return 2
    data, figures = root / "tests/data/gpu", root / "docs/benchmarks.md"
    data.mkdir(parents=True, exist_ok=True)
    for name in recordings:
        (data / f"{name}{SUFFIX}").write_bytes(files[f"recordings/{name}{SUFFIX}"])
    figures.write_text(placed(figures.read_text(encoding="utf-8"), section), encoding="utf-8")
    print(f"gpu-day: {len(recordings)} recordings in {data.relative_to(root)}, figures in {figures.relative_to(root)}")
    return min(1, replay.main(data))
