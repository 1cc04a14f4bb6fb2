"""`python -m nbguard`: the command line."""

import sys

from nbguard.frontend.cli import main

if __name__ == "__main__":
    sys.exit(main())
