"""`python -m tests.jobs.forks CASES` runs many command lines of nbguard, each in a fork of one process that has PyTorch.

CASES is a JSON file: for each name a folder, the arguments of `nbguard`, and variables. Each folder gets `stdout`, `stderr` and
`status`, which are as Python's own for that command line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch  # noqa: F401 - for the forks


def main(cases: Path) -> None:
    for case in json.loads(cases.read_text()).values():
        folder = Path(case["folder"])
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            os.environ.update(case["variables"])
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
            _end_as_python(case["arguments"])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / "status").write_text(str(status))


def _end_as_python(arguments: list[str]) -> None:
    """Run a line, and end this process as the interpreter would."""
    from nbguard.frontend.cli import main as nbguard

    status = 1
    try:
        status = nbguard(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
