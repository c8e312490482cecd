"""Schedules with split backwards: the weight gradient, which nobody waits for, fills the bubbles.

Source: Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), for ZB-H1; Qi et al., "Pipeline parallelism with
controllable memory" (NeurIPS 2024), for ZB-V. Both keep the order of the microbatches in every gradient.
"""

from __future__ import annotations

from hpctrain.pipeline.actions import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.synchronous import chain_placement, check, with_flush


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients come `rank` microbatches late: the memory of 1F1B's first rank on every rank, and
    with equal costs a bubble of (ranks - 1)(F + I - W).
    """
    check(ranks=ranks, microbatches=microbatches)
    order = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        late = min(rank, microbatches)
        work = [Action(FORWARD, 0, rank, m) for m in range(ahead)]
        for m in range(microbatches):
            if m + ahead < microbatches:
                work.append(Action(FORWARD, 0, rank, m + ahead))
            work.append(Action(INPUT_GRADIENT, 0, rank, m))
            if m >= late:
                work.append(Action(WEIGHT_GRADIENT, 0, rank, m - late))
        work += [Action(WEIGHT_GRADIENT, 0, rank, m) for m in range(microbatches - late, microbatches)]
        order.append(work)
    return with_flush("zb-h1", order, chain_placement(ranks), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: rank r has stages r and 2 ranks - 1 - r, so that the chain goes down the ranks and back up, and the last
    stage's gradient starts where its forward ends. No rank is idle between its first and last action when F = I = W.
    """
    check(ranks=ranks, microbatches=microbatches)
    many = max(2 * ranks - 1, microbatches)  # fewer do not fill the pipeline: theirs is the full order without the rest
    order = []
    for rank in range(ranks):
        stages = rank, 2 * ranks - 1 - rank
        done = {(kind, chunk): 0 for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) for chunk in (0, 1)}
        work: list[Action] = []

        def do(kind, chunk, stages=stages, done=done, work=work):
            work.append(Action(kind, 0, stages[chunk], done[kind, chunk]))
            done[kind, chunk] += 1

        def backward(chunk, do=do):
            do(INPUT_GRADIENT, chunk)
            do(WEIGHT_GRADIENT, chunk)

        for _ in range(2 * (ranks - rank) - 1):
            do(FORWARD, 0)
        for _ in range(rank):
            do(FORWARD, 1)
            do(FORWARD, 0)
        for _ in range(ranks - rank):
            do(FORWARD, 1)
            backward(1)
        while done[FORWARD, 1] < many:
            if done[FORWARD, 0] < many:
                do(FORWARD, 0)
            backward(0)
            do(FORWARD, 1)
            backward(1)
        for _ in range(rank):
            do(INPUT_GRADIENT, 0)
            do(INPUT_GRADIENT, 1)
        for _ in range(ranks - rank):
            do(INPUT_GRADIENT, 0)
            do(WEIGHT_GRADIENT, 0)
        for chunk in (1, 0):
            while done[WEIGHT_GRADIENT, chunk] < done[INPUT_GRADIENT, chunk]:
                do(WEIGHT_GRADIENT, chunk)
        order.append(work)
    return with_flush("zb-v", order, v_placement(ranks), microbatches)


def v_placement(ranks: int) -> dict[tuple[int, int], int]:
    """Two stages a rank: stage s on rank s on the way down, on rank 2 ranks - 1 - s on the way up."""
    return {(0, stage): min(stage, 2 * ranks - 1 - stage) for stage in range(2 * ranks)}
