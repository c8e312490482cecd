"""The words of the schedule language: what one rank does at one point of its order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
INPUT_GRADIENT, WEIGHT_GRADIENT = "input_gradient", "weight_gradient"  # the two halves of a split backward
REDUCE, UPDATE, FREE = "reduce", "update", "free"
SEND, RECEIVE = "send", "receive"
WORK = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
GRADIENT = (BACKWARD, INPUT_GRADIENT)  # these give the stages before their gradient


class Action(NamedTuple):
    """One thing a rank does.

    Attributes:
        kind: forward, backward (both gradients at once), input_gradient, weight_gradient;
            reduce (sum a stage's gradients over its replicas and the data axis), update (make a version of its
            weights), free (drop a version: nothing uses it any more);
            send and receive, which only lowering places.
        replica, stage: whose work. The stage of a message is its sender's.
        microbatch, slice: on what; slices are runs of tokens of one microbatch, each needing those before it.
        version: of the weights, counted in updates: the one used, the one an update makes, the one freed.
        peer: the rank at the other end of a message.
        edge: the number of the message's edge in the graph, the same at both ends. Activations are sent by the stage
            at its start, gradients by the stage at its end.
    """

    kind: str
    replica: int
    stage: int
    microbatch: int = 0
    slice: int = 0
    version: int = 0
    peer: int | None = None
    edge: int | None = None

    @property
    def unit(self) -> tuple[int, int, int, int]:
        """What a forward gives and its gradients take back: replica, stage, microbatch and slice."""
        return self[1:5]  # a large schedule asks hundreds of thousands of times

    @property
    def microbatch_unit(self) -> tuple[int, int, int]:
        """All slices of a microbatch in a stage: replica, stage and microbatch."""
        return self[1:4]

    def __str__(self):
        text = f"{self.kind} of stage {self.stage}"
        if self.kind in (REDUCE, UPDATE, FREE):
            text += f", version {self.version}"
        else:
            text += f", microbatch {self.microbatch}"
        if self.slice:
            text += f", slice {self.slice}"
        if self.replica:
            text += f", replica {self.replica}"
        if self.peer is not None:
            text += f" {'to' if self.kind == SEND else 'from'} rank {self.peer} on edge {self.edge}"
        return text


class Fused(NamedTuple):
    """A forward and a backward of different microbatches, run as one so that each hides the other's communication.

    Both start when the inputs of both are there, and both results leave when both are done.
    """

    forward: Action
    backward: Action


def flat(order: Iterable[Action | Fused]) -> Iterator[Action]:
    """The actions of one rank's order, fused pairs opened."""
    for entry in order:
        if isinstance(entry, Fused):
            yield from entry
        else:
            yield entry
