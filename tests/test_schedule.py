"""The schedule language: the graph, the validator and its errors, weight versions, the timeline and the command."""

import itertools
import json
from dataclasses import replace

import pytest

from hpctrain.cli import main
from hpctrain.pipeline import NAMES, Action, Edge, Fused, StageGraph, schedule
from hpctrain.pipeline.simulate import Costs, peaks

SIZES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 13)))


def with_order(made, change):
    """The schedule after `change` of a copy of its order."""
    order = [list(rank) for rank in made.order]
    change(order)
    return type(made)(**{**vars(made), "order": order})


def index(order, kind, microbatch, stage=None):
    return next(
        i for i, a in enumerate(order) if a[:1] == (kind,) and a.microbatch == microbatch and stage in (None, a.stage)
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_right_or_refused(name):
    """Complete by an independent count, valid, and safe: the replay raises where it is not."""
    for ranks, microbatches in SIZES:
        if ranks % 2 and name in ("chimera", "dualpipe"):
            with pytest.raises(ValueError, match=f"ranks={ranks}; use {ranks + 1}, or zb-v or dualpipev"):
                schedule(name, ranks, microbatches)
            continue
        made = schedule(name, ranks, microbatches)
        programs = made.lower().programs
        work = [a for program in programs for a in program]
        units = list(itertools.product(range(made.graph.stages), range(microbatches), range(made.slices)))
        forward = sorted(a[2:5] for a in work if a.kind == "forward")
        inputs = sorted(a[2:5] for a in work if a.kind in ("backward", "input_gradient"))
        weights = sorted(a[2:5] for a in work if a.kind in ("backward", "weight_gradient"))
        assert forward == inputs == weights == units
        assert sum(a.kind == "send" for a in work) == sum(a.kind == "receive" for a in work)
        if not made.delayed:
            assert sum(a.kind == "update" for a in work) == made.replicas * made.graph.stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_gradients_are_summed_in_the_order_of_the_microbatches(name):
    """So that they are bitwise those of serial accumulation."""
    for ranks, microbatches in SIZES:
        made = schedule(name, ranks, microbatches)
        for stage in range(made.graph.stages):
            summed = [a.microbatch for o in made.order for a in o if a.stage == stage and a.kind[0] in "bw"]
            assert summed == list(range(microbatches))


def test_versions_by_hand():
    """PipeDream on two ranks: the first stage is one update behind, the second never."""
    text = [
        " ".join(f"{a.kind[0]}{a.version}" for a in rank) for rank in schedule("pipedream", 2, 3).order
    ]  # forward, backward, reduce, free, update
    assert text == ["f0 f0 b0 r0 u1 f1 b0 r1 f0 u2 b1 r2 f1 f2 u3", "f0 b0 r0 f0 u1 f1 b1 r1 f1 u2 f2 b2 r2 f2 u3"]
    used = [[a.version for a in rank if a.kind == "forward"] for rank in schedule("pipedream-2bw", 2, 8).order]
    assert used == [[0, 0, 0, 0, 1, 1, 2, 2]] * 2


def test_what_the_validator_says():
    made = schedule("zb-h1", 2, 2)

    def refuse(change, match, of=made):
        with pytest.raises(ValueError, match=match):
            with_order(of, change).validate()

    def swap(rank, a, b):
        def change(order):
            i, j = index(order[rank], *a), index(order[rank], *b)
            order[rank][i], order[rank][j] = order[rank][j], order[rank][i]

        return change

    refuse(lambda o: o[1].pop(index(o[1], "forward", 1)), r"forward of stage 1, microbatch 1 is missing")
    refuse(lambda o: o[1].insert(0, Action("forward", 0, 1, 1)), r"forward of stage 1, microbatch 1 is done twice")
    refuse(
        lambda o: o[1].insert(0, Action("backward", 0, 1, 1)), r"input_gradient of stage 1, microbatch 1 is done besid"
    )
    refuse(lambda o: o[0].insert(0, Action("forward", 0, 1, 1)), r"is on rank 0, but the stage is placed on 1")
    refuse(lambda o: o[0].insert(0, Action("forward", 0, 0, 7)), r"there are 2 microbatches")
    refuse(lambda o: o[0].insert(0, Action("send", 0, 0, 0)), r"an order holds no send")
    refuse(lambda o: o[0].insert(0, Action("teleport", 0, 0, 0)), r"an order holds no teleport")
    refuse(
        swap(0, ("input_gradient", 0), ("weight_gradient", 0)),
        r"weight_gradient of stage 0, microbatch 0 comes before its input_gradient",
    )
    refuse(lambda o: o[0].pop(), r"reduce of stage 0, version 0 is in no update")
    refuse(lambda o: o[0].pop(-2), r"update of stage 0, version 1 comes before the reduction of weight_gradient")
    refuse(lambda o: o[0].insert(0, o[0].pop()), r"update of stage 0, version 1 comes before the reduction of anything")
    refuse(lambda o: [o[0].pop(), o[0].pop()], r"weight_gradient of stage 0, microbatch 1 is in no update")
    refuse(lambda o: o[0].extend([Action("reduce", 0, 0), Action("update", 0, 0, version=2)]), "is updated 2 times")
    refuse(
        swap(0, ("forward", 0), ("input_gradient", 0)),
        r"cannot be carried out: .*input_gradient of stage 0, microbatch 0 on rank 0",
    )
    refuse(lambda o: o[0].append(Fused(Action("forward", 0, 0), Action("forward", 0, 0, 1))), r"cannot be fused")
    stale = schedule("pipedream", 2, 3)
    refuse(
        lambda o: o[1].insert(index(o[1], "backward", 1), o[1].pop(index(o[1], "update", 0))),
        "version 1, which is not made yet",
        of=stale,
    )
    refuse(lambda o: o[0].insert(1, Action("free", 0, 0, version=0)), r"uses version 0, which was freed", of=stale)


def test_a_microbatch_belongs_to_one_replica():
    def change(order):
        order[0][index(order[0], "forward", 0)] = Action("forward", 0, 0, 2)

    with pytest.raises(ValueError, match="microbatch"):
        with_order(schedule("chimera", 2, 4), change).validate()


def test_graphs():
    assert Edge(0, 1, (3, 5), "float64").bytes == 120
    with pytest.raises(ValueError, match="dtype of an edge must be one of float64, .*, got 'double'"):
        Edge(0, 1, (3, 5), "double")
    for edges, match in (([(0, 3)], "leaves"), ([(0, 1), (0, 1)], "two edges"), ([(0, 1), (1, 2), (2, 1)], "cycle")):
        with pytest.raises(ValueError, match=match):
            StageGraph(3, edges)


def test_options_that_would_do():
    for options, match in (
        (("nope", 2, 2), "use one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "ranks=0"),
        (("1f1b", 2, 0), "microbatches=0"),
        (("1f1b", 2, 2, 2), "virtual_stages=2: 1f1b has 1 to a rank"),
        (("zb-v", 2, 2, 3), "virtual_stages=3: zb-v has 2"),
        (("gpipe", 2, 2, None, 4), "use slices=1, or terapipe"),
        (("interleaved", 2, 2, 0), "virtual_stages=0"),
    ):
        with pytest.raises(ValueError, match=match):
            schedule(*options)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("1f1b", (10**8, 1)), ("gpipe", (1, 10**8)), ("terapipe", (2**7, 2**7)), ("chimera", (2**11,) * 2)],
)
def test_what_is_too_large_to_be_listed(name, sizes):
    with pytest.raises(ValueError, match="ranks × microbatches.* must be at most 1048576, as a schedule lists"):
        schedule(name, *sizes)


def test_command(tmp_path, capsys):
    picture, programs = tmp_path / "out.png", tmp_path / "out.json"
    arguments = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "3", "--costs", "1,1,1", "--compare"]
    assert main([*arguments, "--plot", str(picture), "--json", str(programs)]) == 0
    said = capsys.readouterr().out
    assert "no deadlock" in said
    assert all(name in said for name in NAMES)
    assert "25.0" in said  # bubble: 3 of 12
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(programs.read_text())
    assert told["placement"] == [[0, 0, 0], [0, 1, 1]]
    assert told["edges"] == [[0, 1]]
    assert [a["kind"][0] + str(a["microbatch"]) for a in told["ranks"][1]][:4] == ["r0", "f0", "r1", "b0"]
    assert set(told["ranks"][0][0]) == {"kind", "replica", "stage", "microbatch", "slice", "version", "peer", "edge"}
    assert main(["schedule", "chimera", "--ranks", "3", "--microbatches", "3"]) == 2
    assert "use 4" in capsys.readouterr().err
    assert main([*arguments[:-2], "1,1"]) == 2
    assert main([*arguments, "--plot", "out.txt"]) == 2


def test_peaks_of_other_costs_need_no_second_simulation():
    for name in ("pipedream", "zb-v", "dualpipe"):
        made = schedule(name, 4, 8)
        costs = Costs(1, 1, 1, latency=0.5, activation=2.0)
        for memory in ({"activation": 0.0, "weights": 3.0}, {"activation": 5.0}):
            other = replace(costs, **memory)
            assert peaks(made, other, made.simulate(costs)) == made.simulate(other).peak
    made = schedule("pipedream", 4, 8)
    weights = Costs(activation=0.0, weights=3.0)  # versions of them: a stage's delay and one
    assert peaks(made, weights, made.simulate()) == [12.0, 9.0, 6.0, 3.0]
