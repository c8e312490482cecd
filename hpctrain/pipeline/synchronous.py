"""Schedules of a chain that end every step with a flush: GPipe, 1F1B, interleaved 1F1B, and forwards alone."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

from hpctrain.given import check_types
from hpctrain.pipeline.actions import BACKWARD, FORWARD, REDUCE, UPDATE, Action, Fused
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.schedules import Schedule

LARGEST = 2**20  # forwards, whose messages are found in a minute; 64 ranks with 1,024 microbatches have 2^16


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, in the order of the microbatches, as in serial accumulation.

    Source: Huang et al., "GPipe" (NeurIPS 2019).
    """
    check(ranks=ranks, microbatches=microbatches)
    order = [
        [Action(kind, 0, stage, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]
        for stage in range(ranks)
    ]
    return with_flush("gpipe", order, chain_placement(ranks), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up of forwards, one forward and one backward in turn, so that stage s holds at most ranks - s
    microbatches. Backward runs in the order of the microbatches.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), with a flush at the end of every step (Fan et al., DAPPLE, 2021).

    >>> for rank in one_f_one_b(2, 3).order:
    ...     print(" ".join(f"{a.kind[0]}{a.microbatch}" for a in rank))
    f0 f1 b0 f2 b1 b2 r0 u0
    f0 b0 f1 b1 f2 b2 r0 u0
    """
    check(ranks=ranks, microbatches=microbatches)
    order = [one_forward_one_backward(stage, ranks, microbatches) for stage in range(ranks)]
    return with_flush("1f1b", order, chain_placement(ranks), microbatches)


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    """The order of work of one stage of 1F1B."""
    ahead = min(stages - 1 - stage, microbatches)
    forwards = [Action(FORWARD, 0, stage, m) for m in range(microbatches)]
    backwards = [Action(BACKWARD, 0, stage, m) for m in range(microbatches)]
    steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return forwards[:ahead] + steady + backwards[microbatches - ahead :]


def interleaved(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r has the stages r, r + ranks, …, `virtual_stages` of them. Microbatches go through in
    groups of `ranks`; a group that is not full is the full one's order without the missing microbatches.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (SC 2021), §2.2.
    """
    check(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    total = virtual_stages * ranks * -(-microbatches // ranks)
    order = []
    for rank in range(ranks):
        work: dict[str, list[Action]] = {FORWARD: [], BACKWARD: []}
        for step in range(total):
            group, within = divmod(step, virtual_stages * ranks)
            chunk, m = within // ranks, group * ranks + within % ranks
            work[FORWARD].append(Action(FORWARD, 0, chunk * ranks + rank, m))
            work[BACKWARD].append(Action(BACKWARD, 0, (virtual_stages - 1 - chunk) * ranks + rank, m))
        # one rank with virtual_stages on one chain has each microbatch's forwards one after another, as any other
        ahead = ranks - 1 if virtual_stages == 1 else 2 * (ranks - 1) + (virtual_stages - 1) * ranks
        ahead = min(total, ahead - (rank if virtual_stages == 1 else 2 * rank))
        steady = [action for pair in zip(work[FORWARD][ahead:], work[BACKWARD]) for action in pair]
        order.append(work[FORWARD][:ahead] + steady + work[BACKWARD][total - ahead :])
    placement = {(0, stage): stage % ranks for stage in range(virtual_stages * ranks)}
    return with_flush("interleaved", order, placement, microbatches)


def forward_only(
    ranks: int,
    microbatches: int,
    placement: Mapping[tuple[int, int], int] | None = None,
    replica_of: Sequence[int] | None = None,
    graph: StageGraph | None = None,
) -> Schedule:
    """Forwards alone, for evaluation, of stages placed in any way, of a chain if no graph is given; microbatch m goes
    through replica_of[m], or 0.

    A rank takes `ranks` microbatches through its first stage, then through its next, as interleaved schedules do.

    Raises:
        ValueError: for a stage that is placed on none of the ranks, and a microbatch without a replica.
    """
    check(ranks=ranks, microbatches=microbatches)
    placement = chain_placement(ranks) if placement is None else placement
    graph = graph or StageGraph.chain(1 + max((stage for _, stage in placement), default=0))
    replica_of = [0] * microbatches if replica_of is None else replica_of
    if len(replica_of) != microbatches:
        raise ValueError(f"replica_of must name a replica for each of {microbatches} microbatches, got {replica_of}")
    check_placed(graph, placement, set(replica_of), ranks)
    order: list[list[Action]] = [[] for _ in range(ranks)]
    for start in range(0, microbatches, ranks):
        for stage in graph.sorted:
            for m in range(start, min(start + ranks, microbatches)):
                order[placement[replica_of[m], stage]].append(Action(FORWARD, replica_of[m], stage, m))
    return Schedule("forward_only", graph, placement, order, microbatches, training=False)


# What other generators need too ------------------------------------------------------------------------------------


def with_flush(
    name: str,
    order: list,
    placement: Mapping[tuple[int, int], int],
    microbatches: int,
    slices: int = 1,
    graph: StageGraph | None = None,
) -> Schedule:
    """The schedule that ends with a reduction and an update of every stage, without the microbatches that are too many.

    Leaving microbatches out is safe: no microbatch needs another one.
    Reductions go by stage, the same order on all ranks, since each of them joins the replicas of a stage.
    """
    ending: list[list[Action]] = [[] for _ in order]
    for kind, version in ((REDUCE, 0), (UPDATE, 1)):
        for (replica, stage), rank in sorted(placement.items(), key=lambda item: item[0][1]):
            ending[rank].append(Action(kind, replica, stage, version=version))
    kept = [[*present(rank, microbatches), *end] for rank, end in zip(order, ending)]
    graph = graph or StageGraph.chain(1 + max(stage for _, stage in placement))
    return Schedule(name, graph, placement, kept, microbatches, slices)


def present(entries: Iterable[Action | Fused], microbatches: int) -> Iterable[Action | Fused]:
    """The entries of microbatches below `microbatches`; of a fused pair, the half that is left."""
    for entry in entries:
        if isinstance(entry, Fused):
            left = [action for action in entry if action.microbatch < microbatches]
            yield from [entry] if len(left) == 2 else left
        elif entry.microbatch < microbatches:
            yield entry


def check_placed(
    graph: StageGraph, placement: Mapping[tuple[int, int], int], replicas: Iterable[int], ranks: int | None = None
) -> None:
    """Raise ValueError for a stage of these replicas that is placed on none of the ranks; None: of any number."""
    for replica, stage in itertools.product(replicas, range(graph.stages)):
        place = placement.get((replica, stage), -1)
        if place < 0 or (ranks is not None and place >= ranks):
            known = "0 and more" if ranks is None else f"0 … {ranks - 1}"
            raise ValueError(f"stage {stage} of replica {replica} is placed on no rank, which are {known}")


def chain_placement(ranks: int) -> dict[tuple[int, int], int]:
    """Stage s on rank s."""
    return {(0, stage): stage for stage in range(ranks)}


def check(**sizes: int) -> None:
    """Raise ValueError for a size below 1, and for too large a product, as a schedule lists that many."""
    at_least_one(**sizes)
    if (product := math.prod(sizes.values())) > LARGEST:
        raise ValueError(
            f"{' × '.join(sizes)} must be at most {LARGEST}, as a schedule lists them all, got {product}; use fewer of "
            "them"
        )


def at_least_one(**sizes: int) -> None:
    """Raise ValueError for a size that is not whole, or below 1."""
    for name, size in sizes.items():
        check_types(**{name: (size, numbers.Integral)})
        if size < 1:
            raise ValueError(f"{name}={size}: a schedule needs at least one; use {name}=1 or more")
