"""The certificate: whatever the graph, placement and costs, lowered schedules pass fully blocking messages."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.pipeline import NAMES, Action, Costs, Edge, Lowered, StageGraph, list_schedule, one_f_one_b, schedule


def random_case(seed):
    """A schedule of a random DAG, placement and costs, some of them zero, and other costs to lower it with."""
    rng = random.Random(seed)
    stages, ranks, replicas = rng.randint(1, 8), rng.randint(1, 5), rng.randint(1, 2)
    names = rng.sample(range(stages), stages)  # edges need not go to higher numbers
    edges = [
        Edge(names[a], names[b], (rng.randint(0, 50),)) for b in range(stages) for a in range(b) if rng.random() < 0.4
    ]
    placement = {(0, stage): rng.randrange(ranks) for stage in range(stages)}
    ranks = max(ranks, 2)
    for stage in range(stages if replicas == 2 else 0):
        placement[1, stage] = rng.choice([r for r in range(ranks) if r != placement[0, stage]])

    def costs():
        times = [[rng.choice((0, 1, rng.random(), 10 * rng.random())) for _ in range(stages)] for _ in range(3)]
        return Costs(*times, latency=rng.choice((0, 0.5)), bandwidth=rng.choice((10, 1e9)))

    in_flight = rng.choice((None, 1, 2, 3))
    graph = StageGraph(stages, edges)
    return list_schedule(graph, placement, rng.randint(1, 5), costs(), rng.random() < 0.5, in_flight), costs()


def naive(made):
    """Receive just before use, send just after: what one writes first."""
    home, edges = made.placement, made.graph.edges
    programs = []
    for rank, order in enumerate(made.order):
        program = []
        for action in order:
            if action.kind == "weight_gradient" or action.kind not in ("forward", "backward", "input_gradient"):
                program.append(action)
                continue
            forward, r = action.kind == "forward", action.replica
            before, after = [], []
            for number, edge in enumerate(edges):
                ends = (edge.source, edge.target) if forward else (edge.target, edge.source)
                peers = home[r, ends[0]], home[r, ends[1]]
                if action.stage == ends[1] and peers[0] != rank:
                    before.append(action._replace(kind="receive", stage=ends[0], peer=peers[0], edge=number))
                if action.stage == ends[0] and peers[1] != rank:
                    after.append(action._replace(kind="send", peer=peers[1], edge=number))
            program += [*before, action, *after]
        programs.append(program)
    return Lowered(programs, dict(home), made.graph, made.slices)


def blocks(told):
    """A replay of the JSON by another program: messages are pairs of ranks that both must stand at them. True if stuck.
    Work must have every input, a message must be of something its sender made.
    """
    programs, home = told["ranks"], {(r, s): rank for r, s, rank in told["placement"]}
    at, have = [0] * len(programs), [set() for _ in programs]
    name = ("replica", "stage", "microbatch", "slice")
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            a = program[at[rank]]
            unit = tuple(a[n] for n in name)
            going = [rank]
            if a["kind"] == "send":
                other = programs[a["peer"]][at[a["peer"]]] if at[a["peer"]] < len(programs[a["peer"]]) else None
                if other is None or other != {**a, "kind": "receive", "peer": rank}:
                    continue
                what = "out" if told["edges"][a["edge"]][0] == a["stage"] else "gradient"
                assert (what, unit) in have[rank]
                have[a["peer"]].add((what, unit))
                going.append(a["peer"])
            elif a["kind"] == "receive":
                continue
            elif a["kind"] == "reduce":
                going = [one for (_, stage), one in home.items() if stage == a["stage"]]
                heads = [programs[one][at[one]] if at[one] < len(programs[one]) else {} for one in going]
                if any((h.get("kind"), h.get("stage")) != ("reduce", a["stage"]) for h in heads):
                    continue
            elif a["kind"] in ("forward", "backward", "input_gradient"):
                forward = a["kind"] == "forward"
                for source, target in told["edges"]:
                    mine, theirs = (target, source) if forward else (source, target)
                    if mine == a["stage"]:
                        assert ("out" if forward else "gradient", (unit[0], theirs, *unit[2:])) in have[rank]
                assert forward or ("out", unit) in have[rank]
                have[rank].add(("out" if forward else "gradient", unit))
            for one in going:
                at[one] += 1
            moved = True
    return any(at[rank] < len(program) for rank, program in enumerate(programs))


def test_a_thousand_random_graphs():
    stuck = 0
    for seed in range(1000):
        made, costs = random_case(seed)
        lowered = made.lower(costs)  # raises if it does not pass
        assert not blocks(json.loads(lowered.to_json())), seed
        try:
            naive(made).replay()
        except ValueError as error:
            assert "deadlock when messages block" in str(error)
            stuck += 1
    assert stuck > 100  # many of these graphs hardly communicate


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "pipedream-2bw", "terapipe"])
def test_another_program_replays_the_json(name):
    for ranks, microbatches in ((2, 3), (3, 1), (4, 9)):
        assert not blocks(json.loads(schedule(name, ranks, microbatches).lower().to_json()))


@pytest.mark.parametrize("name", ["chimera", "dualpipe", "dualpipev"])
def test_another_program_replays_two_directions(name):
    for ranks, microbatches in ((2, 3), (4, 1), (4, 9), (6, 24)):
        lowered = schedule(name, ranks, microbatches).lower(Costs(1, 0.5, 2, latency=0.25))
        assert not blocks(json.loads(lowered.to_json()))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_work_that_begins_before_a_message_comes_is_not_behind_it(name):
    """A receive stands behind all work that its rank begins before the sender has finished."""
    made = schedule(name, 4, 6)
    spans = {a: span for rank in made.simulate().spans for span in rank for a in span.actions}
    for program in made.lower().programs:
        for place, action in enumerate(program):
            if action.kind == "receive":
                gradient = made.graph.edges[action.edge].target == action.stage
                kinds = ("backward", "input_gradient") if gradient else ("forward",)
                sender = next(a for a in spans if a.kind in kinds and a.unit == action.unit)
                later = [spans[a] for a in program[place:] if a in spans]
                assert all(span.start >= spans[sender].end - 1e-9 for span in later), (sender, action)


TIMES = st.one_of(st.just(0), st.floats(0.01, 10))
CATALOGUE = st.tuples(
    st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)
)


@given(CATALOGUE, st.tuples(*[st.lists(TIMES, min_size=1, max_size=5)] * 3), st.sampled_from([0, 0.3, 5]))
def test_any_schedule_with_any_costs(case, times, latency):
    """Costs order the messages; whatever they are, the programs pass, and no rank computes in less than its work."""
    name, ranks, microbatches, virtual_stages, slices = case
    ranks += ranks % 2 if name in ("chimera", "dualpipe") else 0
    options = {"interleaved": {"virtual_stages": virtual_stages}, "terapipe": {"slices": slices}}.get(name, {})
    made = schedule(name, ranks, microbatches, **options)
    tables = [[table[stage % len(table)] for stage in range(made.graph.stages)] for table in times]
    costs = Costs(*tables, latency=latency)
    assert not blocks(json.loads(made.lower(costs).to_json()))
    result, work = made.simulate(costs), [0.0] * ranks
    for (_, stage), rank in made.placement.items():
        work[rank] += sum(table[stage] for table in tables) * microbatches / made.replicas
    longest = sum(sum(table) for table in tables)  # of one microbatch there and back
    if microbatches % made.replicas == 0:
        assert result.busy == pytest.approx(work, rel=1e-9, abs=1e-12)
    if not slices > 1 or name != "terapipe":
        assert result.makespan >= max([*result.busy, 0 if made.splits else longest]) * (1 - 1e-9)


def test_the_certificate_can_fail():
    made = one_f_one_b(3, 4)
    assert blocks(json.loads(naive(made).to_json()))
    with pytest.raises(ValueError, match="the programs deadlock when messages block: rank 0 at .* to rank 1"):
        naive(made).replay()
    naive(schedule("gpipe", 3, 4)).replay()


def test_the_certificate_looks_at_the_data():
    lowered = one_f_one_b(2, 1).lower()
    for program in lowered.programs:
        program[:] = [a for a in program if not (a.peer is not None and not lowered.is_gradient(a))]
    with pytest.raises(ValueError, match="forward of stage 1, microbatch 0 on rank 1 has no forward of stage 0"):
        lowered.replay()
    early = one_f_one_b(2, 1).lower()
    early.programs[0].insert(0, early.programs[0].pop(1))
    with pytest.raises(ValueError, match="rank 0 sends what it does not have"):
        early.replay()


def test_a_reduction_in_two_orders_is_refused():
    made = schedule("chimera", 2, 2)
    order = [list(rank) for rank in made.order]
    first, second = [i for i, a in enumerate(order[0]) if a.kind == "reduce"]
    order[0][first], order[0][second] = order[0][second], order[0][first]
    with pytest.raises(ValueError, match="cannot be carried out: .*reduce of stage"):
        type(made)(**{**vars(made), "order": order}).lower()


def test_messages_of_a_branch():
    """A stage with two successors on one rank sends to each along its own edge."""
    graph = StageGraph(3, [(0, 1), (0, 2)])
    lowered = list_schedule(graph, {(0, 0): 0, (0, 1): 1, (0, 2): 1}, 1).lower()
    sent = [(a.stage, a.peer, a.edge) for program in lowered.programs for a in program if a.kind == "send"]
    assert sorted(sent) == [(0, 1, 0), (0, 1, 1), (1, 0, 0), (2, 0, 1)]
    assert lowered.programs[0][0] == Action("forward", 0, 0)
