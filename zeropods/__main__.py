"""`python -m zeropods`."""

import sys

from zeropods.cli import main

if __name__ == "__main__":
    sys.exit(main())
