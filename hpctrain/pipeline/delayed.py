"""Schedules without a flush: weights change while microbatches are under way, and gradients are of older weights.

Every forward and its backward use the version of the weights that the schedule binds to them; versions that nothing
uses any more are freed before the next is made.
"""

from __future__ import annotations

from collections import Counter

from hpctrain.pipeline.actions import BACKWARD, FORWARD, FREE, REDUCE, UPDATE, WORK, Action, flat
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.list_scheduler import list_schedule
from hpctrain.pipeline.message_driven import AMPNet
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.synchronous import at_least_one, chain_placement, check, one_forward_one_backward


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """PipeDream with weight stashing: 1F1B with an update after every microbatch. Stage s holds up to ranks - s
    versions and is SGD delayed by ranks - 1 - s updates.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), §3.3.
    """
    check(ranks=ranks, microbatches=microbatches)
    return _chain("pipedream", ranks, [1] * microbatches, lambda stage, m: max(0, m - (ranks - 1 - stage)))


def pipedream_2bw(ranks: int, microbatches: int) -> Schedule:
    """PipeDream-2BW: an update after every batch of at least `ranks` microbatches, whose gradients are of the weights
    one update before; two versions are held. The microbatches are divided into as many batches as there can be (one, if
    they are fewer than the ranks), of equal size or one more.

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (ICML 2021), §3.1.
    """
    check(ranks=ranks, microbatches=microbatches)
    count = max(1, microbatches // ranks)
    sizes = [microbatches // count + (batch < microbatches % count) for batch in range(count)]
    batch_of = [batch for batch, size in enumerate(sizes) for _ in range(size)]
    return _chain("pipedream-2bw", ranks, sizes, lambda stage, m: max(0, batch_of[m] - 1))


def ampnet(
    ranks: int, microbatches: int, max_active_keys: int | None = None, min_update_frequency: int = 1,
    staleness_correction: bool = False,
) -> Schedule:  # fmt: skip
    """AMPNet on a chain, as it goes when all stages cost the same: ranks take gradients before forwards, and up to
    `max_active_keys` microbatches (as many as ranks if not given) are under way. A real run goes by what has arrived.

    Source: Gaunt et al., "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks" (2017).
    """
    keys = ranks if max_active_keys is None else max_active_keys
    check(ranks=ranks, microbatches=microbatches)
    at_least_one(max_active_keys=keys, min_update_frequency=min_update_frequency)
    options = AMPNet(keys, min_update_frequency, staleness_correction)
    graph, placement = StageGraph.chain(ranks), chain_placement(ranks)
    order = list_schedule(graph, placement, microbatches, in_flight=min(keys, microbatches)).order
    updated = [
        _updated(stage, list(flat(rank)), microbatches, min_update_frequency) for stage, rank in enumerate(order)
    ]
    return Schedule("ampnet", graph, placement, updated, microbatches, delayed=True, asynchronous=options)


def _updated(stage: int, order: list[Action], microbatches: int, every: int) -> list[Action]:
    """The stage's work, with an update after every so many gradients and after the last; forwards take the newest
    version, which stays until their gradients are there."""
    actions, newest, done, taken = [], 0, 0, {}
    for action in order:
        if action.kind not in WORK:
            continue
        if action.kind == FORWARD:
            taken[action.microbatch] = newest
            actions.append(action._replace(version=newest))
            continue
        before = set(taken.values()) | {newest}
        actions.append(action._replace(version=taken.pop(action.microbatch)))
        done += 1
        updates = done % every == 0 or done == microbatches
        unused = before - set(taken.values()) - (set() if updates else {newest})
        if updates:
            actions.append(Action(REDUCE, 0, stage, version=newest))
        actions += [Action(FREE, 0, stage, version=version) for version in sorted(unused)]
        if updates:
            newest += 1
            actions.append(Action(UPDATE, 0, stage, version=newest))
    return actions


def _chain(name: str, ranks: int, batches: list[int], version) -> Schedule:
    """1F1B of all microbatches with an update after every batch; version(stage, microbatch) is the one used."""
    microbatches = sum(batches)
    last = {sum(batches[: number + 1]) - 1 for number in range(len(batches))}
    order = []
    for stage in range(ranks):
        uses = Counter(version(stage, m) for m in range(microbatches))
        alive, rank = [0], []
        for action in one_forward_one_backward(stage, ranks, microbatches):
            action = action._replace(version=version(stage, action.microbatch))
            rank.append(action)
            if action.kind != BACKWARD:
                continue
            uses[action.version] -= 1
            if action.microbatch in last:
                newest = alive[-1]
                rank.append(Action(REDUCE, 0, stage, version=newest))
                rank += [Action(FREE, 0, stage, version=v) for v in alive if not uses[v]]
                rank.append(Action(UPDATE, 0, stage, version=newest + 1))
                alive = [v for v in alive if uses[v]] + [newest + 1]
        order.append(rank)
    graph = StageGraph.chain(ranks)
    return Schedule(name, graph, chain_placement(ranks), order, microbatches, delayed=True)
