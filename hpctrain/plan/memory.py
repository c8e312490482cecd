"""Bytes that a rank needs."""

from __future__ import annotations

from hpctrain.plan.job import Job


def state_bytes(job: Job, method: str, data: int) -> float:
    """Of one parameter: weights, gradients, masters and the optimizer's numbers; see data_parallel/README.md."""
    masters: float = (job.master if job.master != job.itemsize else 0) + job.moments * job.master
    weights: float = job.itemsize
    gradients: float = job.reduce
    if method in ("zero1", "zero2", "zero3"):
        masters /= data
    if method in ("zero2", "zero3"):
        gradients /= data
    if method == "zero3":
        weights /= data
    return weights + gradients + masters


def updated_bytes(job: Job) -> float:
    """That the optimizer reads and writes of one parameter, and clipping before it."""
    return 2 * job.reduce + 2 * (1 + job.moments) * job.master + (job.itemsize if job.master != job.itemsize else 0)
