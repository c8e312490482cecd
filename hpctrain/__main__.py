"""`python -m hpctrain`, the same as the command `hpctrain`."""

import sys

from hpctrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
