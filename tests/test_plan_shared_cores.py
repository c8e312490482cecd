"""Pipelines whose ranks share cores: what those that wait lend to others."""

import hypothesis
import pytest
from hypothesis import strategies as st

from hpctrain.pipeline import Costs
from hpctrain.pipeline.simulate import busy, run
from hpctrain.plan import shared_cores
from hpctrain.plan.pipelines import shape

SCHEDULES = st.sampled_from([("gpipe", 0), ("1f1b", 0), ("interleaved", 2), ("zb-h1", 0), ("zb-v", 2), ("dualpipe", 0)])
TIMES = st.floats(0.0, 4.0)


@hypothesis.given(st.data(), SCHEDULES, st.sampled_from([2, 4]), st.sampled_from([0.25, 0.5, 0.75]), TIMES)
def test_between_what_cores_and_messages_allow(data, schedule, ranks, share, latency):
    """At any time all cores work, or all ranks that do have one of their own."""
    name, virtual = schedule
    found = shape(name, ranks, 2 * ranks, virtual)
    stages = found.schedule.graph.stages
    tables = [data.draw(st.lists(TIMES, min_size=stages, max_size=stages)) for _ in range(4)]
    costs = Costs(*tables, latency=latency)
    starts, ends, _ = run(found.schedule, costs, found.tasks)
    alone, work = max(ends), sum(busy(found.schedule, found.tasks, starts, ends)) / ranks
    taken = shared_cores.makespan(found.schedule, costs, found.tasks, share)
    of_a_core = ([share * each for each in table] for table in tables)
    faster = Costs(*of_a_core, latency=latency)
    least = max(run(found.schedule, faster, found.tasks)[1])
    assert max(work, least) * (1 - 1e-9) <= taken <= (work + least) * (1 + 1e-9)
    whole = shared_cores.makespan(found.schedule, costs, found.tasks, 1.0)
    assert whole == pytest.approx(alone, rel=1e-9, abs=1e-9)


def test_by_hand():
    """Four stages on two cores. One microbatch has a core for itself wherever it is, as have two; of four as many as
    four are under way, by rounds 1, 2, 3, 4, 3, 2 and 1."""
    costs = Costs(2.0, 2.0, 2.0)
    for microbatches, expected in ((1, 12.0), (2, 15.0), (4, 27.0)):
        found = shape("gpipe", 4, microbatches, 0)
        assert shared_cores.makespan(found.schedule, costs, found.tasks, 0.5) == expected


def test_messages_arrive_beside_work():
    """Two microbatches of four stages have two cores, so that it is as if each stage had its own."""
    found = shape("gpipe", 4, 2, 0)
    times, halves = ([each / 2**half for each in (2.0, 1.5, 0.5)] for half in (0, 1))
    alone = max(run(found.schedule, Costs(*halves, latency=0.25), found.tasks)[1])
    assert shared_cores.makespan(found.schedule, Costs(*times, latency=0.25), found.tasks, 0.5) == pytest.approx(alone)
