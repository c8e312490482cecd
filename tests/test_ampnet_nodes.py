"""Nodes, queues, graphs and placements of AMPNet one by one, without MPI."""

import itertools
import re

import pytest
import torch
from torch import nn

from hpctrain.config import load_config
from hpctrain.pipeline import AMPNet, schedule
from hpctrain.pipeline.ampnet import (
    Broadcast,
    Condition,
    Group,
    Join,
    Loss,
    MessageGraph,
    Restate,
    Source,
    Transform,
    Ungroup,
    Weights,
    concat,
    loop_counter,
    place,
    split,
)
from hpctrain.pipeline.ampnet.node import BACKWARD, FORWARD, Message, Run
from hpctrain.pipeline.ampnet.ready import Item, Ready, Record, Replay

RUN = Run([None] * 9, True)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


def sent(emissions):
    """(direction, port, state, rows as a list) of each."""
    found = []
    for direction, port, (state, payload) in emissions:
        found.append((direction, port, state, None if payload is None else payload.flatten().tolist()))
    return found


def ready(node):
    """A Transform whose module is made."""
    node.module = node.make()
    node.weights = Weights(dict(node.module.named_parameters()), torch.optim.SGD([{"params": []}], 0.1), AMPNet())
    return node


def test_condition_and_join_find_the_way_back():
    which, either = Condition(lambda state, instance: state[1]), Join()
    message = Message((3, 1), rows(5))
    assert sent(which.forward(0, message, RUN)) == [(FORWARD, 1, (3, 1), [5])]
    assert sent(either.forward(1, message, RUN)) == [(FORWARD, 0, (3, 1), [5])]
    assert either.waiting() == 1
    assert sent(either.backward(0, Message((3, 1), rows(7)), RUN)) == [(BACKWARD, 1, (3, 1), [7])]
    assert sent(which.backward(1, Message((3, 1), rows(7)), RUN)) == [(BACKWARD, 0, (3, 1), [7])]
    assert either.waiting() == which.waiting() == 0
    with pytest.raises(ValueError, match=re.escape("port 2 for state (3, 2); there are 2")):
        which.forward(0, Message((3, 2), None), RUN)


def test_a_loop_counter_counts_back():
    counter = loop_counter(2)
    assert sent(counter.forward(0, Message((3, 8, 4), rows(1)), RUN)) == [(FORWARD, 0, (3, 8, 5), [1])]
    assert sent(counter.backward(0, Message((3, 8, 5), rows(2)), RUN)) == [(BACKWARD, 0, (3, 8, 4), [2])]
    with pytest.raises(ValueError, match="of another instance"):
        Restate(lambda state, instance: (0,)).forward(0, Message((3,), None), RUN)


def test_two_messages_of_one_state_are_refused():
    join = Join()
    join.forward(0, Message((3,), None), RUN)
    with pytest.raises(ValueError, match=re.escape("two messages of state (3,)")):
        join.forward(1, Message((3,), None), RUN)


def test_broadcast_adds_up():
    copies = Broadcast(3)
    assert [e[1] for e in sent(copies.forward(0, Message((0,), rows(1)), RUN))] == [0, 1, 2]
    assert copies.backward(1, Message((0,), rows(0.5)), RUN) == []
    assert copies.backward(0, Message((0,), None), RUN) == []
    assert sent(copies.backward(2, Message((0,), rows(2)), RUN)) == [(BACKWARD, 0, (0,), [2.5])]
    copies.forward(0, Message((1,), rows(1)), RUN)
    back = [copies.backward(port, Message((1,), None), RUN) for port in (2, 1, 0)]
    assert sent(back[-1]) == [(BACKWARD, 0, (1,), None)]


def test_group_waits_for_all_and_keeps_their_places():
    group = Group(lambda state, instance: (state[:1], state[1], 3))
    for place_, given in ((2, rows(5, 6)), (0, rows(1))):
        assert group.forward(0, Message((4, place_), given), RUN) == []
    assert group.waiting() == 1
    assert sent(group.forward(0, Message((4, 1), rows(2)), RUN)) == [(FORWARD, 0, (4,), [1, 2, 5, 6])]
    expected = [(BACKWARD, 0, (4, 0), [10]), (BACKWARD, 0, (4, 1), [20]), (BACKWARD, 0, (4, 2), [30, 40])]
    assert sent(group.backward(0, Message((4,), rows(10, 20, 30, 40)), RUN)) == expected
    assert group.waiting() == 0


def test_ungroup_waits_on_the_way_back():
    cut = Ungroup(lambda state, instance: [((*state, 7), 2), ((*state, 8), 1)])
    assert sent(cut.forward(0, Message((4,), rows(1, 2, 3)), RUN)) == [
        (FORWARD, 0, (4, 7), [1, 2]),
        (FORWARD, 0, (4, 8), [3]),
    ]
    assert cut.backward(0, Message((4, 8), rows(30)), RUN) == []
    assert sent(cut.backward(0, Message((4, 7), None), RUN)) == [(BACKWARD, 0, (4,), [0, 0, 30])]
    assert cut.waiting() == 0
    with pytest.raises(ValueError, match=re.escape("parts of [2, 1] rows for 2")):
        cut.forward(0, Message((4,), rows(1, 2)), RUN)


def test_transforms_of_several_ports():
    """Their payloads go to the module by port, in whatever order they come; gradients likewise."""
    joined, cut = ready(concat(dim=0)), ready(split([1, 2], dim=0))
    assert joined.forward(1, Message((0,), rows(2, 3)), RUN) == []
    (out,) = joined.forward(0, Message((0,), rows(1)), RUN)
    assert out.message.payload.flatten().tolist() == [1, 2, 3]
    parts = cut.forward(0, out.message, RUN)
    assert sent(parts) == [(FORWARD, 0, (0,), [1]), (FORWARD, 1, (0,), [2, 3])]
    assert cut.backward(1, Message((0,), rows(20, 30)), RUN) == []
    (back,) = cut.backward(0, Message((0,), rows(10)), RUN)
    assert back.message.payload.flatten().tolist() == [10, 20, 30]
    assert sent(joined.backward(0, back.message, RUN)) == [(BACKWARD, 0, (0,), [10]), (BACKWARD, 1, (0,), [20, 30])]
    assert joined.waiting() == cut.waiting() == 0


def test_a_loss_begins_the_way_back():
    class Square(nn.Module):
        def forward(self, x, target):
            return (x - target).square().sum()

    loss = ready(Loss(Square))
    run = Run([(None, 1.0)], True)
    assert sent(loss.forward(0, Message((0,), rows(3, 0)), run)) == [(BACKWARD, 0, (0,), [4, -2])]
    assert [(state, value.item()) for state, value in loss.losses] == [((0,), 5)]
    assert sent(loss.forward(0, Message((0,), rows(3)), run._replace(training=False))) == [(BACKWARD, 0, (0,), None)]
    with pytest.raises(ValueError, match="must give a loss"):
        ready(Loss(nn.Identity, given=None)).forward(0, Message((0,), rows(3)), run)


def item(direction, instance, edge=0):
    return Item(edge, direction, Message((instance,), None))


def test_gradients_first_then_the_oldest_then_the_first_to_come():
    queue = Ready()
    given = [item(FORWARD, 1, 0), item(BACKWARD, 3), item(FORWARD, 1, 9), item(BACKWARD, 2), item(FORWARD, 0)]
    for each in given:
        queue.push(each)
    assert len(queue) == 5
    assert [queue.pop() for _ in range(6)] == [given[i] for i in (3, 1, 4, 0, 2)] + [None]


def test_a_replay_waits_for_the_next_of_the_record(tmp_path):
    order = [item(FORWARD, i) for i in (2, 0, 1)]
    Record([[each.name for each in order]]).save(tmp_path / "order.json")
    queue = Replay(Record.load(tmp_path / "order.json").runs[0])
    queue.push(order[1])
    assert queue.pop() is None
    queue.push(order[2])
    queue.push(order[0])
    assert [queue.pop() for _ in range(4)] == [*order, None]


def loop_graph():
    graph = MessageGraph().add("source", Source()).add("h", Join()).add("cell", Transform(None))
    graph.add("again", Condition(lambda s, i: 0)).add("next", loop_counter()).add("head", Loss(None))
    graph.connect("source", "h").connect("h", "cell").connect("cell", "again").connect(("again", 0), "head")
    return graph.connect(("again", 1), "next")


def test_graphs_are_checked():
    graph = loop_graph()
    with pytest.raises(ValueError, match="port 1 of the inputs of 'h' is not connected"):
        graph.check()
    graph.connect("next", ("h", 1)).check()
    for call, message in (
        (lambda: graph.add("h", Join()), "there is a node 'h' already"),
        (lambda: graph.connect("cell", "nowhere"), "no node 'nowhere'"),
        (lambda: graph.connect(("cell", 1), "head"), "'cell' has 1 outputs, got port 1"),
        (lambda: graph.connect("cell", ("h", 1)), "use a Broadcast or a Join"),
        (lambda: MessageGraph().add("a", Join()).check(), "one Source"),
        (lambda: MessageGraph().add("a", Source()).check(), "at least one Loss"),
        (lambda: AMPNet(0), "max_active_keys must be at least 1, got 0"),
        (lambda: AMPNet(1, 0), "min_update_frequency must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_placements():
    """The loop's edge back is left out; the two dear nodes are apart, and the time is the best of all placements."""
    graph = loop_graph().connect("next", ("h", 1))
    assert graph.forward_edges() == [(0, 1), (1, 2), (2, 3), (3, 5), (3, 4)]
    found = place(graph, 2, {"cell": 3.0, "head": 3.0})
    assert found["cell"] != found["head"]
    assert place(graph, 1, {"cell": 3.0}) == dict.fromkeys(graph.nodes, 0)
    assert place(graph, 2, {"cell": 1.0, "head": 1.0}, latency=100.0) == dict.fromkeys(graph.nodes, 0)
    diamond = (
        MessageGraph().add("s", Source()).add("c", Broadcast()).add("a", Transform(None)).add("b", Transform(None))
    )
    diamond.add("l", Loss(None, 2)).connect("s", "c").connect(("c", 0), "a").connect(("c", 1), "b")
    assert diamond.connect("a", "l").connect("b", ("l", 1)).forward_edges() == [(0, 1), (1, 2), (2, 4), (1, 3), (3, 4)]


SIZES = list(itertools.product((1, 2, 4), (1, 5, 8), (1, 3, 9), (1, 3)))


@pytest.mark.parametrize(("ranks", "count", "keys", "every"), SIZES)
def test_the_schedule_that_is_shown(ranks, count, keys, every):
    """An update after every so many gradients and the last; no more under way than keys; valid, so that it is safe."""
    made = schedule("ampnet", ranks, count, max_active_keys=keys, min_update_frequency=every)
    made.lower()
    assert made.asynchronous == AMPNet(keys, every)
    assert [len(group) for group in made.updates] == [every] * (count // every) + [count % every] * (count % every > 0)
    under_way = list(itertools.accumulate({"forward": 1, "backward": -1}.get(a.kind, 0) for a in made.order[0]))
    assert max(under_way) == min(keys, ranks, count) if keys <= ranks else max(under_way) <= keys


def test_options(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("[model]\ntied = false\n[train]\nclip = 0.0\nmicrobatches = 4\n")
    load = lambda *overrides: load_config(config, overrides)  # noqa: E731
    load("pipeline.schedule=ampnet", "grid.pipeline=2", "pipeline.max_active_keys=3")
    for overrides, message in (
        (["grid.data=2"], r"use grid.data = 1 and grid.tensor = 1, got \{'replica': 2\}"),
        (["grid.tensor=2"], "use grid.data = 1 and grid.tensor = 1"),
        (["data_parallel.method=zero1"], "use data_parallel.method = ddp, got zero1"),
        (["train.clip=1"], "use train.clip=0 and model.tied=false"),
        (["model.tied=true"], "use train.clip=0 and model.tied=false"),
        (["train.recompute=block"], "use train.recompute=none"),
        (["pipeline.virtual_stages=2"], "ampnet has 1 to a rank"),
        (["pipeline.min_update_frequency=0"], "pipeline.min_update_frequency must be at least 1"),
        (["pipeline.schedule=1f1b", "pipeline.max_active_keys=2"], "are for pipeline.schedule = ampnet, got 1f1b"),
    ):
        with pytest.raises(ValueError, match=message):
            load("pipeline.schedule=ampnet", *overrides)
