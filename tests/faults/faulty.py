"""`hpctrain`, after the statements of the first argument, which break something: they see `rank` and `patch`."""

import os
import sys

from hpctrain import cli


def patch(owner, name, make):
    """Replace a function by make(the function)."""
    setattr(owner, name, make(getattr(owner, name)))


if __name__ == "__main__":
    faults = sys.argv.pop(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    exec(faults, {"rank": rank, "patch": patch, "os": os})
    sys.exit(cli.main())
