"""Which rank works on which node: by their costs, judged by the list scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.pipeline.ampnet.message_graph import MessageGraph
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.list_scheduler import list_schedule
from hpctrain.pipeline.simulate import Costs


def place(
    graph: MessageGraph, ranks: int, seconds: Mapping[str, float], latency: float = 0.0, max_active_keys: int = 4
) -> dict[str, int]:
    """A placement with a short time for 2 `max_active_keys` instances when ranks take gradients first, as the list
    scheduler does: nodes one after another, the dearest first, each where that time is shortest, then single nodes
    moved for as long as it falls.

    Args:
        seconds: forward and backward of one instance in each node, all its turns in a loop together; 0 where a node is
            left out. `trainer.report()["nodes"]`, of a run on one rank, has those of all instances.
        latency: seconds of a message.

    >>> from hpctrain.pipeline.ampnet import Loss, MessageGraph, Source, Transform
    >>> graph = MessageGraph().add("in", Source()).add("a", Transform(None)).add("b", Loss(None))
    >>> place(graph.connect("in", "a").connect("a", "b"), 2, {"a": 1.0, "b": 1.0})
    {'in': 0, 'a': 0, 'b': 1}
    """
    names = list(graph.nodes)
    stages = StageGraph(len(names), graph.forward_edges())
    costs = [max(seconds.get(name, 0.0), 0.0) for name in names]
    model = Costs([cost / 3 for cost in costs], [cost / 3 for cost in costs], [cost / 3 for cost in costs],
                  latency=latency)  # fmt: skip

    def time(placed: list[int]) -> float:
        placement = {(0, stage): rank for stage, rank in enumerate(placed)}
        schedule = list_schedule(stages, placement, 2 * max_active_keys, model, in_flight=max_active_keys)
        return schedule.simulate(model).makespan

    placed = [0] * len(names)
    order = sorted(range(len(names)), key=lambda stage: -costs[stage])
    best, changed = time(placed), True
    while changed:
        changed = False
        for stage in order:
            for rank in range(ranks):
                tried = placed.copy()
                tried[stage] = rank
                found = time(tried) if rank != placed[stage] else best
                if found < best * (1 - 1e-9):
                    placed, best, changed = tried, found, True
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(placed))}  # in the order of the nodes
    return {name: numbers[rank] for name, rank in zip(names, placed)}
