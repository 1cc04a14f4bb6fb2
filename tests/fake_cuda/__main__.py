"""`python -m tests.fake_cuda COMMAND …` runs a command on the fake device; without one, it says where the libraries are."""

from __future__ import annotations

import os
import sys

from tests.fake_cuda.build import CannotBuildError, library
from tests.fake_cuda.launch import environment


def main(command: list[str]) -> int:
    """Replace this process by `command` on the fake device."""
    try:
        if not command:
            print(library())
            return 0
        # what the caller has set stays: FAKE_CUDA_BYTES=… python -m tests.fake_cuda …
        settings = {name: value for name, value in os.environ.items() if name.startswith(("FAKE_CUDA_", "CUDA_VISIBLE_"))}
        os.execvpe(command[0], command, environment(settings))
    except CannotBuildError as error:
        print(f"fake_cuda: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
