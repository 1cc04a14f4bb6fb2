"""The compiled walk under gcc's address and undefined-behaviour sanitisers: `python -m tests.scan.check_sanitised [500]`.

It is compiled anew, into a folder of its own, and loaded into a child in which the sanitisers are loaded first. They end the
child at the first bad access. The heaps are hostile and random ones, each walked in both ways; then many walks of one heap.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "nbguard/memory/scan/heap/_heapwalk.c"
_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g")


def check(heaps: int) -> int:
    """Compile the walk, and return the exit status of the child that walks so many heaps of each kind by it."""
    with tempfile.TemporaryDirectory() as folder:
        include = sysconfig.get_path("include")
        library = str(Path(folder, "_heapwalk.abi3.so"))
        subprocess.run(["gcc", "-shared", "-fPIC", *_FLAGS, f"-I{include}", str(_SOURCE), "-o", library], check=True)
        found = (
            subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True) for name in ("libasan.so", "libubsan.so")
        )
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(map(str.strip, found)),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own at its exit
            "PYTHONMALLOC": "malloc",  # else an object that was freed is still in a pool of Python's
        }
        return subprocess.run(
            [sys.executable, "-m", __spec__.name, str(heaps), folder], env=environment, check=False
        ).returncode


def walk(heaps: int, folder: str) -> list[str]:
    """Walk heaps by the library in `folder`; return those that Python finds something else in, and what was kept."""
    import nbguard.memory.scan.heap as room

    room.__path__.insert(0, folder)
    from nbguard.memory.scan.heap import native
    from tests.scan.check_references import kept_by_walks
    from tests.scan.heaps import graph_of, hostile_heap, random_heap, uninitialised, walked_by

    assert native.compiled is not None, native.why_pure
    assert native.compiled.__file__.startswith(folder), native.compiled.__file__
    blanks, differing = uninitialised(), list[str]()
    for seed in range(heaps):
        for name, values in (("hostile", hostile_heap(seed, blanks)), ("random", random_heap(seed))):
            graph_of(values)  # at the first look Python makes the dicts of attributes that were inline
            with walked_by(None):
                by_python = graph_of(values)
            if graph_of(values) != by_python:
                differing.append(f"{name} heap {seed}")
    return differing + kept_by_walks(heaps)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    if len(sys.argv) <= 2:
        sys.exit(check(count))
    wrong = walk(count, sys.argv[2])
    print(f"{count:,} hostile heaps, {count:,} random ones, {count:,} walks of one heap: {wrong or 'no fault'}")
    sys.exit(bool(wrong))
