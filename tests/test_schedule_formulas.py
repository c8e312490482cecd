"""The simulator against the papers' formulas, and against small cases by hand."""

import itertools
import math
import time

import pytest

from hpctrain.pipeline import (
    Costs,
    Edge,
    Schedule,
    StageGraph,
    balanced_slices,
    forward_only,
    list_schedule,
    schedule,
    token_slices,
)
from hpctrain.pipeline.actions import Action

COSTS = [(1, 1, 1), (2, 3, 1), (1.5, 2, 0.5)]
exactly = lambda value: pytest.approx(value, rel=1e-12, abs=1e-12)  # noqa: E731


def run(name, ranks, microbatches, times=(1, 1, 1), **options):
    """Simulated with costs of one rank's share of the model, whatever the number of stages."""
    made = schedule(name, ranks, microbatches, **options)
    return made.simulate(Costs(*times).scaled(ranks / made.graph.stages))


@pytest.mark.parametrize(("F", "I", "W"), COSTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_gpipe_and_1f1b(p, F, I, W):  # noqa: E741
    for m in (1, p, 2 * p + 1):
        for name in ("gpipe", "1f1b"):
            result = run(name, p, m, (F, I, W))
            assert result.idle == exactly([(p - 1) * (F + I + W)] * p)
            assert result.peak == ([m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)])


@pytest.mark.parametrize(("F", "I", "W"), COSTS)
@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaved(p, v, F, I, W):  # noqa: E741
    for m in (p, 2 * p, 4 * p):
        result = run("interleaved", p, m, (F, I, W), virtual_stages=v)
        assert result.idle == exactly([(p - 1) * (F + I + W) / v] * p)
        if m > p:
            assert max(result.peak) == exactly(p + (p - 1) / v)


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (2, 3, 1), (1.5, 2, 0.5)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_h1(p, F, I, W):  # noqa: E741
    for m in (2 * p, 3 * p + 1):
        result = run("zb-h1", p, m, (F, I, W))
        assert result.idle == exactly([(p - 1) * (F + I - W)] * p)
        assert result.peak == [p] * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_v(p):
    for m in (2 * p - 1, 2 * p, 5 * p):
        result = run("zb-v", p, m)
        assert result.idle == exactly([(p - 1) / 2] * p)
        for spans in result.spans:
            work = [span for span in spans if span.actions[0].kind not in ("reduce", "update")]
            assert work[-1].end - work[0].start == exactly(3 * m)  # never idle between
        assert max(result.peak) == exactly(p)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera(p):
    for units in (1, 2, 3):
        m = units * p
        equal = run("chimera", p, m, (1, 0.5, 0.5))
        assert equal.bubble == exactly([(p - 2) / (2 * m + p - 2)] * p)
        double = run("chimera", p, m)  # B = 2F
        paper = (p - 2) / (3 * m / 2 + p - 2)
        assert double.idle == exactly([(p - 2) * (1 + units)] * p)
        assert (double.bubble == exactly([paper] * p)) == (units == 1 or p == 2)  # the paper's fails for m > p
        assert double.peak == [p / 2 + 1 + min(r, p - 1 - r) if p > 2 else 2 for r in range(p)]


@pytest.mark.parametrize(("F", "W"), [(1, 1), (1, 0.5)])
@pytest.mark.parametrize("fused", [1.0, 0.8, 1.1])
def test_dualpipe_and_dualpipev(F, W, fused):
    """F = I, as the formula has it. Times are of a stage: dualpipev's are half a rank's share."""
    costs, bubble = Costs(F, F, W, fused=fused), fused * (2 * F + W) + (F + W) - 3 * W
    for p, more in itertools.product((2, 4, 8), (0, 1, 6)):
        result = schedule("dualpipe", p, 2 * p + 2 * more).simulate(costs)
        assert result.idle[p // 2] == exactly((p / 2 - 1) * bubble)
        assert result.peak == [p + 1] * p
    for p, more in itertools.product((1, 2, 3, 4), (0, 3)):
        result = schedule("dualpipev", p, 2 * p + more).simulate(costs)
        assert result.idle[-1] == exactly((p - 1) * bubble)
        assert result.peak == [2 * p + 1] * p
    assert schedule("dualpipe", 4, 16).simulate(Costs(2, 1, 1)).idle == [4] * 4  # the formula says 3


@pytest.mark.parametrize("parts", [(1.0,), (0.5, 0.5), (0.4, 0.3, 0.2, 0.1), (0.1, 0.6, 0.3)])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_terapipe(p, parts):
    for m in (1, 3):
        made = schedule("terapipe", p, m, slices=len(parts))
        result = made.simulate(Costs(1, 1.25, 0.75, slices=parts))
        assert result.makespan == exactly(3 * (m * sum(parts) + (p - 1) * max(parts)))
        assert result.peak == exactly([m] * p)


def test_token_slices_are_the_best_of_all():
    def compositions(n):
        yield from ([n], *([first, *rest] for first in range(1, n) for rest in compositions(n - first)))

    for p, m in ((1, 1), (2, 1), (4, 2), (8, 1)):

        def attention(length, before):
            return 7 + length * (3 + before + length / 2)

        def total(lengths, p=p, m=m):
            times, before = [], 0
            for length in lengths:
                times.append(attention(length, before))
                before += length
            return m * sum(times) + (p - 1) * max(times)

        found = token_slices(11, attention, p, m)
        assert sum(found) == 11
        assert total(found) == exactly(min(total(lengths) for lengths in compositions(11)))
    assert token_slices(12, lambda length, before: 1.0, 3, step=4) == [12]
    with pytest.raises(ValueError, match="step=5"):
        token_slices(12, lambda length, before: 1.0, 3, step=5)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_versions_and_delay(p):
    weights = Costs(activation=0, weights=1)
    for m in (2 * p, 5 * p + 1):
        made = schedule("pipedream", p, m).simulate(weights)
        assert [made.staleness[0, s] for s in range(p)] == [p - 1 - s for s in range(p)]
        assert made.peak == [p - s for s in range(p)]
        two = schedule("pipedream-2bw", p, m).simulate(weights)
        assert set(two.staleness.values()) == {1}
        assert two.peak == [2] * p
        assert two.idle == exactly([3 * (p - 1)] * p)  # one fill and drain for all updates
    assert set(schedule("zb-v", p, 3).simulate(weights).staleness.values()) == {0}


def test_messages_by_hand():
    """Two stages, two microbatches; a message takes 0.5 + 20 bytes / 10."""
    graph = StageGraph(2, [Edge(0, 1, (5,))])
    made = schedule("gpipe", 2, 2)
    made = Schedule("gpipe", graph, made.placement, made.order, 2)
    costs = Costs([1, 2], 1, 1, latency=0.5, bandwidth=10, activation=[100, 200])
    result = made.simulate(costs)
    # stage 0: F 0–1 1–2; stage 1: F 3.5–5.5 5.5–7.5, B 7.5–9.5 9.5–11.5; stage 0: B 12–14 14–16
    assert result.makespan == exactly(16)
    assert [(s.start, s.end) for s in result.spans[1][:4]] == [(3.5, 5.5), (5.5, 7.5), (7.5, 9.5), (9.5, 11.5)]
    assert result.idle == exactly([10, 8])
    # stage 1 holds one microbatch and the next message, then two; both gradients wait for stage 0 at 11.5
    assert result.peak == [240, 400]
    path = [(a.kind, a.stage, a.microbatch) for a in result.critical_path]
    assert path[:2] == [("forward", 0, 0), ("forward", 1, 0)]
    assert path[-1] == ("update", 0, 0)


def test_memory_between_the_two_gradients_by_hand():
    """ZB-H1 on two ranks: rank 0 holds two microbatches (F F I W I W); rank 1 one, and 40 of the one before, whose
    weight gradient comes late (F I F I W W)."""
    assert schedule("zb-h1", 2, 2).simulate(Costs(activation=100, kept=40)).peak == [200, 140]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (3, 9, 3)])
def test_warm_up_of_interleaved(p, m, v):
    """Forwards before the first backward: 2 (p - 1 - r) + (v - 1) p, and the one that it turns on (Megatron-LM's
    `get_pp_rank_microbatches`)."""
    made = schedule("interleaved", p, m, virtual_stages=v)
    ahead = [[a.kind for a in order].index("backward") for order in made.order]
    assert ahead == [min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]


def test_the_cycle_is_named():
    made = schedule("gpipe", 2, 2)
    order = [list(rank) for rank in made.order]
    order[0].insert(1, order[0].pop(2))  # stage 0's backward of microbatch 0 before its forward of microbatch 1
    order[1].insert(0, order[1].pop(1))  # stage 1 begins with microbatch 1
    with pytest.raises(ValueError) as error:
        Schedule("x", made.graph, made.placement, order, 2).simulate()
    for name in ("forward of stage 0, microbatch 1 on rank 0", "backward of stage 0, microbatch 0 on rank 0"):
        assert str(error.value).count(name) >= 1
    with pytest.raises(ValueError, match="forward of stage 0, microbatch 1, which no rank does"):
        Schedule("x", made.graph, made.placement, [order[0][:1], [Action("forward", 0, 1, 1)]], 2).simulate()


def test_costs_that_do_not_fit():
    made = schedule("gpipe", 3, 2)
    for costs, match in (
        (Costs([1, 2]), "forward lists 2 values; give one, or 3"),
        (Costs(weight_gradient=-1), "at least 0"),
        (Costs(bandwidth=0), "bandwidth=0"),
        (Costs(bandwidth=math.nan), "bandwidth=nan"),
        (Costs(fused=math.nan), "fused=nan"),
    ):
        with pytest.raises(ValueError, match=match):
            made.simulate(costs)


def test_list_scheduler():
    """It keeps the bound on what is in flight, and a branch on two ranks takes the time of the longer one."""
    diamond = StageGraph(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    places = {(0, 0): 0, (0, 1): 0, (0, 2): 1, (0, 3): 1}
    result = list_schedule(diamond, places, 1).simulate(Costs([1, 2, 5, 1], 0, 0))
    assert result.makespan == 7
    for in_flight in (1, 2, 3):
        made = list_schedule(StageGraph.chain(3), {(0, s): s for s in range(3)}, 7, split=True, in_flight=in_flight)
        assert made.simulate().peak[0] == in_flight
    for placement, stage in (({(0, s): 0 for s in range(3)}, 3), ({}, 0), ({(0, s): 1 - s for s in range(4)}, 2)):
        with pytest.raises(ValueError, match=f"stage {stage} of replica 0 is placed on no rank, which are 0 and more"):
            list_schedule(diamond, placement, 1)
    with pytest.raises(ValueError, match="in_flight=0"):
        list_schedule(diamond, places, 2, in_flight=0)
    with pytest.raises(ValueError, match=r"stages × microbatches must be at most 1048576, .* got 4000000"):
        list_schedule(diamond, places, 10**6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": {(0, 0): 0, (0, 1): 3}}, "stage 1 of replica 0 is placed on no rank, which are 0 … 1"),
        ({"placement": {(0, 0): 0, (0, 1): -1}}, "stage 1 of replica 0 is placed on no rank"),
        ({"placement": {}}, "stage 0 of replica 0 is placed on no rank"),
        ({"replica_of": [0, 1, 0]}, "stage 0 of replica 1 is placed on no rank"),
        ({"replica_of": [0]}, r"replica_of must name a replica for each of 3 microbatches, got \[0\]"),
    ],
)
def test_forwards_alone_that_nobody_does(options, said):
    with pytest.raises(ValueError, match=said):
        forward_only(2, 3, **options)


@pytest.mark.parametrize(("per_token", "per_pair"), [(0, 0), (-1, 1), (1, math.nan), (math.inf, 0)])
def test_slices_of_no_cost(per_token, per_pair):
    with pytest.raises(ValueError, match="per_token and per_pair must be costs from 0 on, of which one is above"):
        balanced_slices(8, 2, per_token, per_pair)


def test_list_scheduler_with_latencies_of_each_edge():
    """A rank takes the branch whose input comes first."""
    diamond, places = StageGraph(4, [(0, 1), (0, 2), (1, 3), (2, 3)]), {(0, 0): 0, (0, 1): 1, (0, 2): 1, (0, 3): 0}
    for latencies, first in (([5, 0, 0, 0], [2, 1]), ([0, 5, 0, 0], [1, 2])):
        order = list_schedule(diamond, places, 1, Costs(latency=latencies)).order[1]
        assert [action.stage for action in order if action.kind == "forward"] == first
    with pytest.raises(ValueError, match="latency lists 2 values; give one, or 4"):
        list_schedule(diamond, places, 1, Costs(latency=[1, 1]))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_large_schedules_are_simulated_in_two_seconds(name):
    made = schedule(name, 64, 512)

    def seconds():
        start = time.process_time()
        assert made.simulate(Costs(latency=0.1)).makespan > 3 * 512
        return time.process_time() - start

    assert any(seconds() < 2 for _ in range(3))  # others may have the machine's caches
