"""`hpctrain`, but rank 1 fails in its third step."""

import sys

from hpctrain import cli
from hpctrain.train.trainer import Trainer


class Failing(Trainer):
    steps = 0

    def forward_backward(self, batches):
        self.steps += 1
        if self.grid.rank == 1 and self.steps == 3:
            raise ArithmeticError("one rank alone")
        return super().forward_backward(batches)


if __name__ == "__main__":
    from hpctrain.train import session

    session.Trainer = Failing
    sys.exit(cli.main())
