"""What ranks that hold the same weights do for each other: sums of gradients, gathers of weights, and the update."""

from __future__ import annotations

import math
from typing import NamedTuple

from hpctrain.plan.division import Division
from hpctrain.plan.job import Choice


class OverReplicas(NamedTuple):
    """Seconds of a step, if nothing hid them."""

    sums: float = 0.0
    gathers: float = 0.0  # of weights, for the next step's first forward
    inside: float = 0.0  # sums inside of a replica, over the ranks that share its sequences
    after: float = 0.0  # of weights, after the update: nothing hides them
    forward: float = 0.0  # with every microbatch
    backward: float = 0.0


def over_replicas(division: Division, choice: Choice, elements: float, experts: float, blocks: int) -> OverReplicas:
    """Of a stage of so many blocks, of which a rank holds so many parameters."""
    job, machine, net, method = division.job, division.machine, division.network, choice.method
    bucket, pieces = machine.software.bucket, max(1, blocks) if method == "zero3" else 1
    kept, alike = (job.itemsize + job.reduce) * (elements + experts), division.groups(choice)

    def over(operation, size, times=1, groups=alike, factor=machine.learned.data):
        """`times` that weights or gradients are read where no cache holds them."""
        seconds = 0.0
        for nbytes, ranks in zip((size * elements, size * experts), groups):
            count = max(pieces, math.ceil(nbytes / bucket) if bucket else 1)
            seconds += count * operation(nbytes / count, ranks)
            seconds += machine.device.cold(times * nbytes, kept) if ranks.size > 1 else 0.0
        return seconds * factor

    if method == "ddp":
        return OverReplicas(over(net.all_reduce, job.comm, 2))
    if method == "local_sgd":  # gradients are summed inside of a replica, whose weights are averaged
        inside, across = division.replica_groups(choice)
        return OverReplicas(
            inside=over(net.all_reduce, job.comm, 2, inside, machine.learned.sequence),
            after=over(net.all_reduce, job.itemsize, 2, across) * job.averaged,
        )
    if method == "parameter_server":
        # A server receives its part of the gradients from each worker, and without staleness the other servers'
        # zeros, and sends them its part of the weights: as in a collective of `served` times as many bytes.
        others = choice.replicas - (job.servers if job.staleness else 1)
        served = others / (choice.replicas - 1) * choice.replicas / job.servers
        return OverReplicas(
            over(lambda nbytes, ranks: net.reduce_scatter(served * nbytes, ranks), job.comm),
            after=over(lambda nbytes, ranks: net.all_gather(served * nbytes, ranks), job.itemsize),
        )
    scatter, gather = over(net.reduce_scatter, job.comm), over(net.all_gather, job.itemsize)
    if method == "zero1":
        return OverReplicas(scatter, gather)
    if method == "zero2":
        return OverReplicas(gathers=gather, backward=scatter)
    return OverReplicas(forward=gather, backward=gather + scatter)


def updated(division: Division, choice: Choice, elements: float, experts: float) -> float:
    """Parameters that a rank updates in a step, of those that it holds."""
    if choice.method.startswith("zero"):
        return elements / choice.replicas + experts / division.groups(choice)[1].size
    if servers := division.job.servers:  # at every push where gradients may be stale
        return (elements + experts) * (choice.data - servers if division.job.staleness else 1) / servers
    return elements + experts
