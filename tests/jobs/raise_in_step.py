"""`hpctrain`, but rank 1 fails in its third step."""

import sys

from hpctrain import cli
from hpctrain.train.trainer import Trainer


class Failing(Trainer):
    steps = 0

    def step(self, microbatches):
        self.steps += 1
        if self.grid.rank == 1 and self.steps == 3:
            raise ArithmeticError("one rank alone")
        return super().step(microbatches)


if __name__ == "__main__":
    from hpctrain.train import job

    job.Trainer = Failing
    sys.exit(cli.main())
