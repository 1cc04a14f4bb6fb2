"""Records what the ranks of planted faults knew, for tests that replay it: `python -m tests.ranks.record FOLDER`.

FOLDER is where `tests.ranks.jobs` has run. Written are tests/data/ranks/faults.jsonl.gz (of each fault, on 2 and 4 ranks, the
facts that a rank's diagnosis rested on, and what must be said of them) and PyTorch's own dumps of two of the faults.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

from tests.ranks.planted import FAULTS

DATA = Path(__file__).parents[1] / "data" / "ranks"
DUMPED = ("skips_before_a_barrier", "fewer_batches_with_batchnorm")


def main(folder: Path) -> None:
    DATA.mkdir(exist_ok=True)
    lines = []
    for fault in FAULTS:
        for world in (2, 4):
            paths = (folder / f"{fault.name}-{world}-{rank}.facts" for rank in range(world))
            facts = next((path for path in paths if path.exists()), None)
            if facts is None:
                continue
            said = {
                "name": fault.name,
                "world": world,
                "kinds": fault.kinds,
                "ranks": fault.culprits(world),
                "collective": fault.collective,
                "lines": fault.lines if fault.is_placed else [],
                "facts": [json.loads(line) for line in facts.read_text().splitlines()],
            }
            lines.append(json.dumps(said))
            for rank in range(world) if fault.name in DUMPED else ():
                shutil.copy(folder / f"{fault.name}-{world}-{rank}.dump", DATA / f"{fault.name}-{world}-rank_{rank}")
    (DATA / "faults.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
