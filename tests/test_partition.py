"""Partitioners against all contiguous partitions, counted out one by one."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.pipeline import Costs, Edge, LayerCosts, Schedule, StageGraph, partition, schedule, score
from hpctrain.pipeline.partitioners.dynamic import dynamic
from hpctrain.pipeline.partitioners.linear import linear
from hpctrain.pipeline.partitioners.problem import Problem
from hpctrain.pipeline.partitioners.search import improved
from hpctrain.shard import split


def every(layers, stages):
    """All contiguous partitions."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in itertools.pairwise((0, *cuts, layers))]


def case(seed):
    """Layers of which one is four times as dear, messages that cost nothing or as much as layers."""
    rng = random.Random(seed)
    stages = rng.choice([2, 3, 4])
    layers, microbatches = rng.randint(stages, 8), rng.choice([1, 2, 4, 8, 13])
    forward = [rng.uniform(0.5, 1.5) for _ in range(layers)]
    forward[rng.randrange(layers)] *= 4
    times = [[f * rng.uniform(0.8, 1.2) for f in forward] for _ in range(2)]
    activation, weights = ([rng.randint(1, 100) for _ in range(layers)] for _ in range(2))
    costs = LayerCosts(forward, *times, [rng.randint(1, 1000) for _ in range(layers)], activation, weights)
    return costs, stages, microbatches, rng.choice([math.inf, 3000.0, 500.0])


def formula(costs, counts, microbatches, bandwidth):
    """Σ t + messages there and back + (microbatches - 1) max t."""
    stops = list(itertools.accumulate(counts))
    layers = [sum(each) for each in zip(costs.forward, costs.input_gradient, costs.weight_gradient)]
    stages = [sum(layers[stop - count : stop]) for stop, count in zip(stops, counts)]
    messages = sum(2 * costs.message[stop - 1] / bandwidth for stop in stops[:-1])
    return sum(layers) + messages + (microbatches - 1) * max(stages)


def simulated(costs, counts, name, microbatches, bandwidth=math.inf):
    """The simulator, asked without the partitioners."""
    made = schedule(name, len(counts), microbatches)
    stops = list(itertools.accumulate(counts))
    tables = [
        [sum(table[stop - count : stop]) for stop, count in zip(stops, counts)]
        for table in (costs.forward, costs.input_gradient, costs.weight_gradient, costs.activation, costs.weights)
    ]
    edges = [Edge(s, s + 1, (costs.message[stop - 1],), "uint8") for s, stop in enumerate(stops[:-1])]
    made = Schedule(name, StageGraph(len(counts), edges), made.placement, made.order, microbatches)
    return made.simulate(Costs(*tables[:3], bandwidth=bandwidth, activation=tables[3], weights=tables[4]))


@pytest.mark.parametrize("seed", range(40))
def test_formula_is_minimised(seed):
    """By dynamic and by linear programming."""
    costs, stages, microbatches, bandwidth = case(seed)
    problem = Problem(costs, schedule("1f1b", stages, microbatches), bandwidth=bandwidth)

    def value(counts):
        return formula(costs, counts, microbatches, bandwidth)

    best = min(map(value, every(len(costs), stages)))
    assert min(map(value, dynamic(problem))) == pytest.approx(best, rel=1e-9)
    assert value(linear(problem, math.inf)) == pytest.approx(best, rel=1e-5)  # the solver's tolerance


POSITIVE = st.floats(0.01, 100)
LAYERS = st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE, st.integers(0, 1000)), min_size=4, max_size=9)


@given(LAYERS, st.integers(2, 4), st.integers(1, 12), st.sampled_from([math.inf, 3000.0, 20.0]))
def test_formula_is_minimised_for_any_chain(layers, stages, microbatches, bandwidth):
    costs = LayerCosts(*zip(*layers))
    problem = Problem(costs, schedule("1f1b", stages, microbatches), bandwidth=bandwidth)

    def value(counts):
        return formula(costs, counts, microbatches, bandwidth)

    best = min(map(value, every(len(costs), stages)))
    assert min(map(value, dynamic(problem))) == pytest.approx(best, rel=1e-9)
    assert value(linear(problem, math.inf)) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("bandwidth", [30.0, 100.0])
def test_of_two_stages_a_rank_the_slower_counts_twice(bandwidth):
    """Dynamic programming does not know which stages meet on a rank: it takes two of the slowest."""
    for seed in range(10):
        rng = random.Random(seed)
        forward = [rng.uniform(0.2, 3) for _ in range(14)]
        message = [rng.randint(1, 300) for _ in range(14)]

        def value(counts, forward=forward, message=message):
            """Of 3 microbatches: twice the slowest stage for each but the first, and the messages."""
            ends = list(itertools.accumulate(counts, initial=0))
            slowest = max(2 * sum(forward[start:stop]) for start, stop in itertools.pairwise(ends))
            return 2 * 2 * slowest + sum(2 * message[end - 1] / bandwidth for end in ends[1:-1])

        costs = LayerCosts(forward, forward, [0.0] * 14, message)
        found = dynamic(Problem(costs, schedule("zb-v", 2, 3), bandwidth=bandwidth))
        assert min(map(value, found)) == pytest.approx(min(map(value, every(14, 4))), rel=1e-9)


def needed(name, ranks, microbatches, **bytes_of_layers):
    """Bytes that each of as many layers as stages needs in the stage of its number."""
    made = schedule(name, ranks, microbatches)
    problem = Problem(LayerCosts([1.0] * made.graph.stages, **bytes_of_layers), made)
    return [problem.bytes(stage)[stage] for stage in range(made.graph.stages)]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "activations"),
    [
        ("gpipe", 3, 5, [5, 5, 5]),
        ("1f1b", 4, 8, [4, 3, 2, 1]),
        ("1f1b", 4, 2, [2, 2, 2, 1]),
        ("zb-h1", 2, 4, [2, 2]),
        ("terapipe", 2, 3, [3, 3]),
        ("pipedream", 3, 6, [3, 2, 1]),
    ],
)
def test_microbatches_that_a_stage_holds(name, ranks, microbatches, activations):
    assert needed(name, ranks, microbatches, activation=1) == pytest.approx(activations, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "versions"), [("1f1b", [1, 1, 1]), ("pipedream", [3, 2, 1]), ("pipedream-2bw", [2, 2, 2])]
)
def test_versions_of_weights_that_a_stage_holds(name, versions):
    assert needed(name, 3, 9, weights=1, activation=0) == versions


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_simulated_time_is_within_two_percent_of_the_best(name):
    for seed in range(30):
        costs, stages, microbatches, bandwidth = case(seed)
        options = {"schedule": name, "bandwidth": bandwidth}
        found = partition("dp", costs, stages, microbatches, **options)
        times = {
            tuple(counts): simulated(costs, counts, name, microbatches, bandwidth).makespan
            for counts in every(len(costs), stages)
        }
        assert times[tuple(found)] <= 1.02 * min(times.values())
        assert score(found, costs, stages, microbatches, **options) == pytest.approx(times[tuple(found)], rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_finds_the_best(seed):
    costs, stages, microbatches, bandwidth = case(seed)
    found = partition("rl", costs, stages, microbatches, bandwidth=bandwidth, seed=seed)
    assert found == partition("rl", costs, stages, microbatches, bandwidth=bandwidth, seed=seed)
    best = min(
        simulated(costs, counts, "1f1b", microbatches, bandwidth).makespan for counts in every(len(costs), stages)
    )
    assert score(found, costs, stages, microbatches, bandwidth=bandwidth) == pytest.approx(best, rel=1e-12)


def test_the_policy_learns():
    """Of 40,920 partitions of 24 equal layers into 5 stages it is to find one within 1% of the even one's time, from
    where a dear first layer makes the even one 20% worse."""
    costs = LayerCosts([4] + [1] * 23, [4] + [1] * 23, [4] + [1] * 23)
    even, found = (score(partition(method, costs, 5, 20), costs, 5, 20) for method in ("even", "rl"))
    best = score(partition("dp", costs, 5, 20), costs, 5, 20)
    assert found <= 1.02 * best < 0.9 * even


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "chimera", "dualpipe", "dualpipev", "terapipe", "pipedream"])
@pytest.mark.parametrize("method", ["dp", "lp"])
def test_every_schedule(name, method):
    """One layer four times as dear: no worse than even, and each stage has a layer."""
    costs = LayerCosts([1, 1, 4, *[1] * 9], [1, 1, 4, *[1] * 9], message=10, activation=1, weights=1)
    options = {"schedule": name, "bandwidth": 100.0}
    found = partition(method, costs, 4, 8, **options)
    assert len(found) == schedule(name, 4, 8).graph.stages
    assert min(found) >= 1
    assert sum(found) == 12
    even = partition("even", costs, 4, 8, **options)
    assert score(found, costs, 4, 8, **options) <= score(even, costs, 4, 8, **options)


def test_chunks():
    costs = LayerCosts([1.0] * 13)
    assert partition("even", costs, 2, 4, stages=6, schedule="interleaved") == [3, 2, 2, 2, 2, 2]
    assert len(partition("dp", costs, 2, 4, stages=6, schedule="interleaved")) == 6
    with pytest.raises(ValueError, match="stages=5 is not a multiple of ranks=2; use 4"):
        partition("dp", costs, 2, 4, stages=5, schedule="interleaved")


def test_even_is_split():
    for layers, stages in itertools.product((4, 7, 8), (1, 2, 3, 4)):
        parts = [split(layers, stages, stage) for stage in range(stages)]
        found = partition("even", LayerCosts([1.0] * layers), stages, 3)
        assert found == [part.stop - part.start for part in parts]


@pytest.mark.parametrize("method", ["dp", "lp", "rl"])
def test_memory(method):
    """With the least memory that any partition needs, one that fits is found; with less, the error says how much."""
    for seed in range(4):
        costs, stages, microbatches, bandwidth = case(seed)
        peaks = {
            tuple(counts): max(simulated(costs, counts, "1f1b", microbatches, bandwidth).peak)
            for counts in every(len(costs), stages)
        }
        least = min(peaks.values())
        options = {"bandwidth": bandwidth, "seed": 0}
        for memory in (least, (least + max(peaks.values())) / 2):
            found = partition(method, costs, stages, microbatches, memory=memory, **options)
            assert peaks[tuple(found)] <= memory
        with pytest.raises(ValueError, match=f"the least that would do is {least:g} bytes a rank"):
            partition(method, costs, stages, microbatches, memory=least - 1, **options)


def test_memory_decides():
    """The fast partition does not fit: layer 0 is quick but large, and its stage holds the most microbatches."""
    costs = LayerCosts([1, 1, 1, 1], message=0, activation=[50, 10, 10, 10])
    assert partition("dp", costs, 2, 8) == [2, 2]
    for method in ("dp", "lp", "rl"):
        assert partition(method, costs, 2, 8, memory=100) == [1, 3]  # stage 0 holds two microbatches
    for method, name in (("even", r"\[2, 2\]"), ([2, 2], r"\[2, 2\]")):
        with pytest.raises(ValueError, match=f"memory=100: partition {name} needs 120 bytes on a rank"):
            partition(method, costs, 2, 8, memory=100)


def test_mistakes():
    costs = LayerCosts([1.0] * 4)
    assert partition([1, 3], costs, 2, 4) == [1, 3]
    for counts in ([4], [0, 4], [2, 3], [1.0, 3.0], [1, 1, 2]):
        with pytest.raises(ValueError, match=r"2 numbers of at least 1 are wanted whose sum is 4, as \[2, 2\]"):
            partition(counts, costs, 2, 4)
    for match, call in (
        ("partition='best': use one of even, dp, lp, rl, or list", lambda: partition("best", costs, 2, 4)),
        ("4 layers cannot fill the 5 stages of 1f1b on 5 ranks", lambda: partition("dp", costs, 5, 4)),
        ("microbatches=0", lambda: partition("dp", costs, 2, 0)),
        ("there is no schedule 'x'", lambda: partition("dp", costs, 2, 4, schedule="x")),
        ("input_gradient lists 1 values for 2 layers; give one, or 2", lambda: LayerCosts([1, 2], [1])),
        ("weights=-1: costs are finite and at least 0", lambda: LayerCosts([1, 2], weights=-1)),
        ("ranks=0", lambda: partition("dp", costs, 0, 4, stages=4)),
        ("bandwidth=0", lambda: score([2, 2], costs, 2, 4, bandwidth=0)),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_the_work_is_bounded(monkeypatch):
    """What is simulated for long chains is limited by a number of actions, not by time, so that all ranks agree."""
    monkeypatch.setattr("hpctrain.pipeline.partitioners.search.WORK", 20_000)
    costs = LayerCosts([1.0 + layer % 3 for layer in range(40)], message=1)
    problem = Problem(costs, schedule("1f1b", 8, 16))
    start = [12, *[4] * 7]
    found = improved(problem, [start], lambda verdict: verdict[:2])
    assert problem.judge(found).makespan < problem.judge(start).makespan
    assert 20_000 <= problem.simulated < 21_000
