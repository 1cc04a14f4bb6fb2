"""`python -m nbguard`: the command line."""

import sys

from nbguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
