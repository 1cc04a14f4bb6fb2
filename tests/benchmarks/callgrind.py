"""Instructions that a program executes, counted by valgrind's callgrind (apt-get install valgrind).

What else runs on the machine changes nothing in them. The program begins uncounted, as to import PyTorch there takes minutes
else, and says itself where to count.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def order(what: str) -> None:
    """Tell the callgrind around this process to count (`--instr=on`), or to write what it has counted (`--dump=NAME`)."""
    subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, capture_output=True)


def counted(
    command: Sequence[str], folder: str, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, list[int]]]:
    """Run a command in callgrind, with files in `folder`; yield what its first thread did up to each dump, by the dump's name.

    Instructions come first; with `--cache-sim=yes` the events follow that callgrind's files name.
    """
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes", *options]
    files = [f"--callgrind-out-file={folder}/out.%p", f"--log-file={folder}/log.%p"]
    subprocess.run([*valgrind, *files, *command], check=True, env=env)
    for path in Path(folder).glob("out.*-01"):
        text = path.read_text()
        label, totals = re.search(r"Trigger: dump (\w+)", text), re.search(r"^totals: ([\d ]+)", text, re.MULTILINE)
        if label and totals:
            yield label[1], [int(number) for number in totals[1].split()]
