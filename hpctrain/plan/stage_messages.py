"""Messages between pipeline stages, whose ranks may be arranged in different boxes; see `models/between_boxes.py`.

A message goes to the rank of the same number in the next stage; where that has another box, its ranks exchange what
each lacks of its own part.
"""

from __future__ import annotations

import functools
import itertools
import math

from hpctrain.choices import PLANE_PRODUCTS
from hpctrain.layout import Cut, Layout, common, volume
from hpctrain.plan.job import Box, Choice, Job
from hpctrain.plan.network import Group, Network


def seconds(job: Job, network: Network, choice: Choice, sender: Box, receiver: Box, distance: int) -> float:
    """Of a microbatch's activations, or their gradients, to a rank so far away."""
    x, y, z = sender
    rows = -(-job.sequences(choice) // z) * job.costs.context / max(1, len(job.slices)) / (choice.ring * choice.ulysses)
    sent = network.message(job.itemsize * rows * job.costs.width / (x * y), distance)
    if sender == receiver:
        return sent
    ranks = math.prod(sender)
    most = max(forward for forward, _ in lacked(job, choice, sender, receiver))
    return sent + network.all_to_all(job.itemsize * most * ranks / (ranks - 1), Group(ranks))


@functools.lru_cache(1 << 12)
def lacked(job: Job, choice: Choice, sender: Box, receiver: Box) -> list[tuple[int, int]]:
    """Elements of a microbatch that each rank of the receiver is sent by others of its stage, forward and backward."""
    sequences, length = job.sequences(choice), job.costs.context // (choice.ring * choice.ulysses)
    length //= max(1, len(job.slices))
    layout = residual(choice.algorithm, sequences, sequences * length, job.costs.width)
    found = []
    for here, there in zip(parts_on(layout, sender), parts_on(layout, receiver)):
        same = volume(common(here, there))
        found.append((volume(there) - same, volume(here) - same))
    return found


def residual(algorithm: str, sequences: int, rows: int, width: int) -> Layout:
    """Of the matrix between stages; as the rules of `layers.rules`, which bring torch."""
    length = max(1, rows // max(1, sequences))
    over_x = Cut("x", length if algorithm in PLANE_PRODUCTS else 1)
    return Layout.of((rows, width), {0: (Cut("z", length), over_x), 1: "y"})


def parts_on(layout: Layout, box: Box):
    """What each rank of a box has, row-major."""
    sizes = dict(zip("xyz", box))
    return [layout.slices(sizes, dict(zip("xyz", place))) for place in itertools.product(*map(range, box))]
