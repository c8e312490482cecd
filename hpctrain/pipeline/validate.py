"""Is a schedule right? Judged by the graph and the placement alone, whatever made it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hpctrain.pipeline.actions import (
    BACKWARD,
    FORWARD,
    FREE,
    INPUT_GRADIENT,
    REDUCE,
    UPDATE,
    WEIGHT_GRADIENT,
    WORK,
    Action,
    Fused,
    flat,
)
from hpctrain.pipeline.tasks import Tasks

if TYPE_CHECKING:
    from hpctrain.pipeline.schedule_like import ScheduleLike


def validate(schedule: ScheduleLike) -> Tasks:
    """Every unit of work exactly once and where its stage is placed; gradients of weights after those of inputs;
    every gradient reduced and then in an update, versions used only while they exist; an order that can be carried out.

    Returns its tasks, sorted.

    Raises:
        ValueError: naming the action that is wrong.
    """
    _placement(schedule)
    histories = defaultdict(list)
    for rank, order in enumerate(schedule.order):
        for entry in order:
            if isinstance(entry, Fused):
                _pair(entry, rank)
        for action in flat(order):
            _place(schedule, action, rank)
            histories[action.replica, action.stage].append(action)
    _work(schedule)
    for place in schedule.placement:
        _versions(schedule, histories[place])
    return Tasks(schedule)


def _placement(schedule) -> None:
    stages, placement = schedule.graph.stages, schedule.placement
    for replica in range(schedule.replicas):
        for stage in range(stages):
            if (replica, stage) not in placement:
                raise ValueError(f"stage {stage} of replica {replica} is placed on no rank")
    holders = defaultdict(list)
    for (replica, stage), rank in placement.items():
        if not (0 <= stage < stages and 0 <= rank < schedule.ranks and replica >= 0):
            raise ValueError(f"stage {stage} of replica {replica} on rank {rank}: there is no such stage or rank")
        holders[stage, rank].append(replica)
    for (stage, rank), replicas in holders.items():
        if len(replicas) > 1:
            raise ValueError(f"rank {rank} holds stage {stage} as replicas {replicas}; one would do")


def _pair(pair: Fused, rank: int) -> None:
    kinds = pair.forward.kind, pair.backward.kind
    if kinds not in ((FORWARD, BACKWARD), (FORWARD, INPUT_GRADIENT)) or pair.forward.unit == pair.backward.unit:
        raise ValueError(f"{pair.forward} cannot be fused with {pair.backward} (rank {rank})")


def _place(schedule, action: Action, rank: int) -> None:
    if action.kind not in (*WORK, REDUCE, UPDATE, FREE):
        raise ValueError(f"{action} on rank {rank}: an order holds no {action.kind}; lowering places messages")
    home = schedule.placement.get((action.replica, action.stage))
    if home != rank:
        raise ValueError(f"{action} is on rank {rank}, but the stage is placed on {home}")
    if action.kind in WORK and not (
        0 <= action.microbatch < schedule.microbatches and 0 <= action.slice < schedule.slices
    ):
        raise ValueError(
            f"{action} on rank {rank}: there are {schedule.microbatches} microbatches of {schedule.slices} slices"
        )


def _work(schedule) -> None:
    """Each unit once, one replica a microbatch."""
    seen: dict[tuple, int] = {}
    owner: dict[int, int] = {}
    for rank, order in enumerate(schedule.order):
        for at, action in enumerate(flat(order)):
            if action.kind not in WORK:
                continue
            key = action.kind, *action.unit
            if key in seen:
                raise ValueError(f"{action} is done twice (again on rank {rank})")
            seen[key] = at
            if owner.setdefault(action.microbatch, action.replica) != action.replica:
                raise ValueError(f"{action}: the microbatch belongs to replica {owner[action.microbatch]}")
    for microbatch in range(schedule.microbatches):
        for stage in range(schedule.graph.stages):
            for part in range(schedule.slices):
                _unit(schedule.training, seen, (owner.get(microbatch, 0), stage, microbatch, part))


def _unit(training: bool, seen: dict[tuple, int], unit: tuple[int, int, int, int]) -> None:
    when = {kind: seen.get((kind, *unit)) for kind in WORK}
    wanted = [FORWARD] if not training else [FORWARD, BACKWARD]
    if training and when[BACKWARD] is None and (when[INPUT_GRADIENT], when[WEIGHT_GRADIENT]) != (None, None):
        wanted = [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT]
    for kind in WORK:
        if kind in wanted and when[kind] is None:
            raise ValueError(f"{Action(kind, *unit)} is missing")
        if kind not in wanted and when[kind] is not None:
            raise ValueError(f"{Action(kind, *unit)} is done besides {' and '.join(wanted)}")
    first, second = when[INPUT_GRADIENT], when[WEIGHT_GRADIENT]
    if first is not None and second is not None and second < first:
        raise ValueError(f"{Action(WEIGHT_GRADIENT, *unit)} comes before its input_gradient")


def _versions(schedule, history: list[Action]) -> None:
    """One stage's weights: gradients, then a reduction, then the update; versions used while they exist."""
    newest = 0
    freed: set[int] = set()
    bound: dict[tuple[int, int, int, int], int] = {}
    pending, reduced = None, None  # a gradient in no reduction yet; a reduction in no update yet
    for action in history:
        if action.kind in WORK:
            if action.version > newest:
                raise ValueError(
                    f"{action} uses version {action.version}, which is not made yet ({newest} is the newest)"
                )
            if action.version in freed:
                raise ValueError(f"{action} uses version {action.version}, which was freed")
            if bound.setdefault(action.unit, action.version) != action.version:
                raise ValueError(f"{action} uses version {action.version}, its unit began with {bound[action.unit]}")
            if action.kind != FORWARD:
                if reduced:
                    raise ValueError(f"{action} comes between {reduced} and its update")
                pending = action
        elif action.kind == REDUCE:
            if reduced or not schedule.training:
                raise ValueError(f"{action}: nothing to reduce")
            pending, reduced = None, action
        elif action.kind == UPDATE:
            if pending or not reduced:
                raise ValueError(f"{action} comes before the reduction of {pending or 'anything'}")
            if action.version != newest + 1:
                raise ValueError(f"{action} should make version {newest + 1}")
            newest, reduced = newest + 1, None
        elif action.version in freed or action.version > newest:
            raise ValueError(f"{action}: there is no such version")
        else:
            freed.add(action.version)
    where = f"stage {history[0].stage} of replica {history[0].replica}" if history else "a stage"
    if pending or reduced:
        raise ValueError(f"{pending or reduced} is in no update")
    if schedule.training and not newest:
        raise ValueError(f"{where} is never updated")
    if newest > 1 and not schedule.delayed:
        raise ValueError(
            f"{where} is updated {newest} times; a schedule with a flush updates once, after all gradients"
        )
