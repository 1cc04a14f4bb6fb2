"""A process that makes files of one format by seeds, and looks at them within bounds.

`python -m tests.fuzz.looks FORMAT FIRST COUNT FOLDER` prints how many were refused, and of how many something was shown. It
ends with an error at the first that breaks a rule.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz.bounds import bound_memory, bound_time, complaints, unescaped, watched
from tests.fuzz.formats import CANARY, FORMATS


def main(name: str, first: str, count: str, where: str) -> None:
    """Look at files of a format, the seeds of which begin with `first`."""
    folder = Path(where) / "files"
    done = watched(folder)
    bound_memory()
    ends: Counter[str] = Counter()
    for seed in range(int(first), int(first) + int(count)):
        print(f"{name} {seed}", file=sys.stderr, flush=True)  # the last line is the one that was never done
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        bound_time()
        ends[_look(name, seed, folder, done)] += 1
    print(json.dumps(ends))


def _look(name: str, seed: int, folder: Path, done: list[str]) -> str:
    """Make files and look at them; return whether they were refused or shown."""
    rng = random.Random(f"{name} {seed}")
    FORMATS[name].make(rng, folder)
    done.clear()
    shown = list(FORMATS[name].look(rng, folder))
    texts = [text for kind, text in shown if kind != "html"]
    assert done == [], done
    assert not (folder / CANARY).exists()
    assert complaints(texts) == []
    assert unescaped([text for kind, text in shown if kind == "html"]) == []
    refused = [text for kind, text in shown if kind == "refused"]
    assert all(text.strip().count("\n") == 0 and "not enough memory" not in text for text in refused), refused
    return "refused" if any(refused) else "shown"


if __name__ == "__main__":
    main(*sys.argv[1:])
