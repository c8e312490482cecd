"""Steps that must not change the weights: what makes one, and what is done about it."""

from __future__ import annotations

import math
import statistics

WINDOW = 32  # steps whose losses say what is usual
REPORTED = 5  # steps whose gradient norms are reported where training ends

KINDS = {1: "spike", 2: "nonfinite"}  # the largest code of all ranks counts


class BadStep(FloatingPointError):
    """Raised on every rank before the update, of which nothing is done.

    Attributes: `kind`, of KINDS, `loss` and `norm`.
    """

    def __init__(self, kind: str, loss: float, norm: float, text: str):
        super().__init__(text)
        self.kind, self.loss, self.norm = kind, loss, norm


class Stopped(RuntimeError):
    """Raised on every rank: the job must not go on."""


class StoppedAlone(RuntimeError):
    """Raised on one rank: the job must not go on, and the others, which go at their own pace, do not know."""


class Sanity:
    """Judges the loss and the norm of the gradient of each step.

    Args:
        factor: a loss above this many times the median of the last WINDOW good steps is a spike; 0: none is. Where the
            median is below zero, it is one that exceeds it by factor - 1 times its absolute value.

    Attributes: `losses`, of those steps; `norms`, of the last REPORTED; `bad_steps`, how many bad ones the job has had.
    """

    def __init__(self, factor: float):
        self.factor = factor
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.bad_steps = 0

    def judge(self, loss: float, norm: float) -> int:
        """0 where all is well, or a code of KINDS."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return 2
        if not (len(self.losses) == WINDOW and self.factor):
            return 0
        usual = statistics.median(self.losses)
        return int(loss - usual > (self.factor - 1) * abs(usual))

    def good(self, loss: float, norm: float) -> None:
        """A step was taken."""
        self.losses = [*self.losses, loss][-WINDOW:]
        self.norms = [*self.norms, norm][-REPORTED:]

    def bad(self, code: int, loss: float, norm: float) -> BadStep:
        """What the code says, in words that are the same on all ranks but for the numbers."""
        if code == 2:
            text = f"loss {loss} and gradient norm {norm} are not both finite"
        else:
            text = f"loss {loss:.4g} is over {self.factor} times the median of the last {WINDOW} steps"
        return BadStep(KINDS[code], loss, norm, text)

    def diverged(self, bad: BadStep, step: int, rate: float, clip: float, alone: bool = False) -> BadStep:
        """The same where it ends the training, with what led to it and what would do. A rank that finds it `alone` can
        neither skip the step nor go back."""
        before = ", ".join(f"{norm:.3g}" for norm in self.norms) or "none"
        clipping = f"below {clip:g}" if clip else "such as 1"
        ways = ["a smaller train.lr", "a longer train.warmup", f"a train.clip {clipping}"]
        if not alone:
            ways.append(f"sanity.{bad.kind}=skip or =rollback")
        return BadStep(
            bad.kind, bad.loss, bad.norm,
            f"step {step}: {bad}; learning rate {rate:.3g}, gradient norms of the steps before: {before}. Use "
            f"{', '.join(ways[:-1])}, or {ways[-1]}",
        )  # fmt: skip
