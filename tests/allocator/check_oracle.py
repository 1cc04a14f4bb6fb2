"""Compare the model with golden runs of the real allocator: python tests/allocator/check_oracle.py FILE…

Prints what differs and "N of M runs exact": every event's order, action, address, size and stream, and the final segments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.allocator import oracle


def main(files: list[str]) -> int:
    """Return 0 if every run is exact."""
    exact = 0
    for name in files:
        found = oracle.difference(oracle.read(Path(name)))
        exact += not found
        if found:
            print(f"{name}: {found}")
    print(f"{exact} of {len(files)} runs exact")
    return 0 if files and exact == len(files) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
